"""What the ranks of a replay do: which steps of which run, from where, in which layout; and have them do it.

[Note: nothing is written] A replay runs by the run's own file, but in another directory, which is removed afterwards.
Only the log-probabilities of a reference are copied there, since the run was compared with them.

[Note: what is changed] A replay may leave out dropout, or take another dtype than the run: then two layouts, which draw
other numbers and round in another order, compute the same. What is changed so is ignored where checkpoint and run file
are compared.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from meshwright.plugin import ConfigError, Degrees, MeshSizes, resolve
from meshwright_run.fate import NEVER
from meshwright_run.preflight import processes
from meshwright_run.run_directory import RunDirectory
from meshwright_run.run_file import RunConfig
from meshwright_run.run_sections import CheckpointConfig, ResumeConfig

from .record import Beginning, Recorded, WentBack

HALF = ("float16", "bfloat16")
TOLERANCES = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 5e-2}
"""Relative tolerances of one step in another order of sums; correct code in float64 agrees to 1e-12."""
EPSILONS = {"float64": 2.2e-16, "float32": 1.2e-7, "bfloat16": 7.8e-3}
RESULT = "result.json"


@dataclass(frozen=True)
class Order:
    """What is done again.

    Attributes:
        step: the last that is done, from 1.
        out: where the first rank, or all, leave what they find.
        layout: run file and number of the ranks whose work one process does; None: each rank does its own.
        changed: keys of the model that are not those of the run.
        compares: whether the work of each data rank is done a second time, by another.
        keeps: whether gradients, parameters and outputs of modules of the last step are kept.
        found: what the ranks have found, where they run in this process.
    """

    config: RunConfig
    world_size: int
    step: int
    beginning: Beginning
    out: Path
    went_back: tuple[WentBack, ...] = ()
    layout: tuple[RunConfig, int] | None = None
    changed: tuple[str, ...] = ()
    compares: bool = False
    keeps: bool = False
    found: list[dict[str, Any]] = field(default_factory=list)


Perform: TypeAlias = Callable[[Order], dict[str, Any]]


def order_of(run: Recorded, step: int, out: Path, *, world_size: int | None = None, keeps: bool = False) -> Order:
    """Return the order to do a step of a run again in its own layout.

    `out` is an empty directory, `world_size` the ranks that a launcher has started; None: they are started here.
    """
    ranks = run.result(step).world_size
    config, beginning = run.config_of(step), run.beginning(step)
    if world_size is None:
        _check_can_start(config, ranks, run.directory)
    elif world_size != ranks:
        raise ConfigError(
            f"step {step} of the run in {run.directory} was done on {ranks} ranks, and there are {world_size} here. "
            f"Start {ranks}, or give --single for one process."
        )
    directory = out / "run"
    directory.mkdir()
    if run.paths.reference.is_file():
        own = RunDirectory(directory)
        # The copy counts as the replay's own, which may be replaced.
        own.claim()
        shutil.copy2(run.paths.reference, own.reference)
    changes = {
        "output_dir": str(directory),
        "overwrite": True,
        "nproc": ranks,
        "resume": ResumeConfig.model_validate({"from": NEVER, "allow": config.resumption.allow}),
        "checkpoint": CheckpointConfig(),
        "trackers": [],
        "profile": None,
        "max_restarts": 0,
        "elastic": None,
        "launch": None,
    }
    went_back = run.went_back(beginning)
    return Order(config.model_copy(update=changes), ranks, step, beginning, out, went_back, keeps=keeps)


def _check_can_start(config: RunConfig, ranks: int, directory: Path) -> None:
    import torch

    from meshwright.plugin import find_device

    if find_device(config.device).type != "cpu" and ranks > torch.accelerator.device_count():
        raise ConfigError(
            f"the run in {directory} was done on {ranks} ranks, and this machine has "
            f"{torch.accelerator.device_count()} accelerators ({processes(config)} ranks would be started). Start "
            f"{ranks} by torchrun, or give --single."
        )


def degrees_of(config: RunConfig, world_size: int) -> Degrees:
    options, others = config.strategy_config, config.wrapper_config
    return resolve(config.strategy, config, world_size, config=options, wrapper_config=others)[1]


def on_one_process(order: Order) -> Order:
    """Return the order for `single`, which does the work of all data ranks in turn."""
    config, degrees = order.config, degrees_of(order.config, order.world_size)
    changes = {
        **{name: each.default for name, each in MeshSizes.model_fields.items()},
        "strategy": "single",
        "strategy_config": {},
        "wrapper_config": {},
        "nproc": 1,
        "micro_batch_size": config.micro_batch_size or max(1, config.batch_size // degrees.dp),
    }
    layout = (config, order.world_size)
    return replace(order, config=config.model_copy(update=changes), world_size=1, layout=layout)


def in_float64(order: Order) -> Order:
    """Return the order for float64, whatever the strategy's options say of dtypes."""
    config = order.config
    changes = {
        "model": {**config.model, "dtype": "float64"},
        "strategy_config": _without_dtypes(config.strategy_config),
        "wrapper_config": {name: _without_dtypes(each) for name, each in config.wrapper_config.items()},
    }
    return replace(order, config=config.model_copy(update=changes), changed=(*order.changed, "dtype"))


def _without_dtypes(options: Mapping[str, Any]) -> dict[str, Any]:
    others = ("mp_policy", "comm_hook", "grad_reduce_in_fp32", "offload_policy")
    return {key: value for key, value in options.items() if not key.endswith("dtype") and key not in others}


def without_dropout(order: Order, model: Mapping[str, Any]) -> Order:
    """Return the order without dropout; `model` is the configuration of the run's model."""
    section, found = dict(order.config.model), dropouts(model)
    section.update(dict.fromkeys(found, 0.0))
    if isinstance(adapter := section.get("peft"), Mapping) and adapter.get("lora_dropout"):
        section["peft"] = {**adapter, "lora_dropout": 0.0}
        found = [*found, "peft"]
    return replace(order, config=order.config.model_copy(update={"model": section}), changed=(*order.changed, *found))


def dropouts(model: Mapping[str, Any]) -> list[str]:
    """Return the keys of a model's configuration that set a dropout above zero."""
    return [key for key, value in model.items() if "drop" in key and isinstance(value, float) and value > 0]


def precision_of(config: RunConfig) -> str:
    """Return the coarsest dtype in which a run computes."""
    options, dtype = str([config.strategy_config, config.wrapper_config]), config.model.get("dtype", "float32")
    if any(each in options for each in HALF) or dtype in HALF:
        return "bfloat16"
    return dtype if dtype in ("float32", "float64") else "float32"


@contextmanager
def scratch() -> Iterator[Path]:
    """Make a directory for what a replay writes, and remove it afterwards."""
    with tempfile.TemporaryDirectory(prefix="meshwright-replay-") as directory:
        yield Path(directory)

"""What the ranks of a replay are told: which steps of which run, from where, in which layout, and what to keep of them.

[Note: nothing is written] A replay runs by the run's own file, but its directory is another one, which is removed
afterwards. Only the log-probabilities of a reference are copied there, since they are what the run was compared with.

[Note: what is changed] A replay may leave out dropout, or take another dtype than the run: then two layouts, which draw
other numbers and round in another order, compute the same. What is changed so is left out where checkpoint and run file
are compared.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..base.errors import ConfigError
from ..mesh.sizes import MeshSizes
from ..strategy.stack import resolve
from ..train.run.checkpoint_section import CheckpointConfig
from ..train.run.fate import NEVER
from ..train.run.preflight import processes
from ..train.run.run_directory import RunDirectory
from ..train.run.run_file import RunConfig
from ..train.run.run_sections import ResumeConfig
from .record import Beginning, Recorded, WentBack

HALF = ("float16", "bfloat16")
DROPOUT = ("drop", "pdrop", "drop_rate")


@dataclass(frozen=True)
class Order:
    """What is done again.

    Attributes:
        config: of the run, as it is run here.
        world_size: ranks.
        step: the last that is done, from 1.
        beginning: what it begins with.
        out: where the first rank, or all, leave what they find.
        went_back: where the run went back to, behind its beginning.
        layout: of one process that does the work of several data ranks: the run file of these, and how many ranks they
            are; None: each rank does its own.
        changed: keys of the model that are not those of the run.
        compares: whether the work of each data rank is done a second time, by another.
        keeps: whether gradients, parameters and outputs of modules of the last step are kept.
        found: in this process, what the ranks have found, where they run in it.
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


def order_of(run: Recorded, step: int, out: Path, *, world_size: int | None = None, **options: Any) -> Order:
    """To do a step of a run again in its own layout.

    Args:
        out: an empty directory.
        world_size: ranks that a launcher has started; None: as many as the step was done on are started here.
        options: further ones of `Order`.

    Raises:
        ConfigError: there is no such step, nothing to begin with, or it was done on another number of ranks.
    """
    done = run.result(step)
    config, beginning = run.config_of(step), run.beginning(step)
    ranks = done.world_size
    if world_size is not None and world_size != ranks:
        raise ConfigError(
            f"step {step} of the run in {run.directory} was done on {ranks} ranks, and there are {world_size} here. "
            f"Start {ranks}, or give --single for one process."
        )
    if world_size is None:
        _check_can_start(config, ranks, run.directory)
    directory = out / "run"
    directory.mkdir()
    if run.paths.reference.is_file():
        shutil.copy2(run.paths.reference, RunDirectory(directory).reference)
    config = config.model_copy(
        update={
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
    )
    return Order(config, ranks, step, beginning, out, run.went_back(beginning), **options)


def _check_can_start(config: RunConfig, ranks: int, directory: Path) -> None:
    import torch

    from ..launch.open_world import find_device

    if find_device(config.device).type == "cpu" or ranks <= torch.accelerator.device_count():
        return
    raise ConfigError(
        f"the run in {directory} was done on {ranks} ranks, and this machine has {torch.accelerator.device_count()} "
        f"accelerators ({processes(config)} ranks would be started). Start {ranks} by torchrun, or give --single."
    )


def degrees_of(config: RunConfig, world_size: int) -> Any:
    """The degrees of a run's mesh."""
    return resolve(
        config.strategy, config, world_size, config=config.strategy_config, wrapper_config=config.wrapper_config
    )[1]


def on_one_process(order: Order) -> Order:
    """The same steps under `single`, which does the work of all data ranks in turn."""
    config, degrees = order.config, degrees_of(order.config, order.world_size)
    rows = config.micro_batch_size or max(1, config.batch_size // degrees.dp)
    sizes = {name: each.default for name, each in MeshSizes.model_fields.items()}
    plain: dict[str, Any] = {
        "strategy": "single",
        "strategy_config": {},
        "wrapper_config": {},
        "nproc": 1,
        "micro_batch_size": rows,
    }
    return replace(
        order, config=config.model_copy(update={**sizes, **plain}), world_size=1, layout=(config, order.world_size)
    )


def in_float64(order: Order) -> Order:
    """The same steps in float64, whatever the strategy's options say of dtypes."""
    config = order.config
    changed = config.model_copy(
        update={
            "model": {**config.model, "dtype": "float64"},
            "strategy_config": _without_dtypes(config.strategy_config),
            "wrapper_config": {name: _without_dtypes(each) for name, each in config.wrapper_config.items()},
        }
    )
    return replace(order, config=changed, changed=(*order.changed, "dtype"))


def _without_dtypes(options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value
        for key, value in options.items()
        if not key.endswith("dtype") and key not in ("mp_policy", "comm_hook", "grad_reduce_in_fp32", "offload_policy")
    }


def without_dropout(order: Order, model: Mapping[str, Any]) -> Order:
    """The same steps without dropout.

    Args:
        model: the configuration of the run's model.
    """
    section, found = dict(order.config.model), dropouts(model)
    section.update(dict.fromkeys(found, 0.0))
    if isinstance(adapter := section.get("peft"), Mapping) and adapter.get("lora_dropout"):
        section["peft"] = {**adapter, "lora_dropout": 0.0}
        found = [*found, "peft"]
    return replace(order, config=order.config.model_copy(update={"model": section}), changed=(*order.changed, *found))


def dropouts(model: Mapping[str, Any]) -> list[str]:
    """Keys of a model's configuration that set a dropout above zero."""
    return [
        key
        for key, value in model.items()
        if any(each in key for each in DROPOUT) and isinstance(value, float) and value > 0
    ]


def precision_of(config: RunConfig) -> str:
    """The dtype in which a run's numbers are rounded: the coarsest that it computes in."""
    told = str([config.strategy_config, config.wrapper_config])
    if any(each in told for each in HALF) or config.model.get("dtype") in HALF:
        return "bfloat16"
    dtype = config.model.get("dtype", "float32")
    return dtype if dtype in ("float32", "float64") else "float32"


TOLERANCES = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 5e-2}
"""Within what one step in another order of sums agrees, relatively; correct code in float64 does to 1e-12."""
EPSILONS = {"float64": 2.2e-16, "float32": 1.2e-7, "bfloat16": 7.8e-3}

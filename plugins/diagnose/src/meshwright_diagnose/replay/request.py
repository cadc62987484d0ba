"""What a replay does: which steps of a recorded run, from where, and in which layout.

[Note: whose run file] A directory has the run file of its last attempt. A step of an earlier attempt is done again by
the run file that the first checkpoint after it has kept.

[Note: abandoned steps] What a run did before a bad step took it back changed nothing but which batches are drawn. So it
is not done again, and the batches that it left out since are left out. An attempt that resumes from an earlier
checkpoint has forgotten what was done after that one.

[Note: nothing is written] A replay runs by the run's own file, but in another directory, which is removed afterwards.
Only the log-probabilities of a reference are copied there, since the run was compared with them.

[Note: what is changed] A replay may leave out dropout, or take another dtype, so that two layouts, which draw other
numbers and round in another order, compute the same. Such changes are ignored where checkpoint and run file are
compared.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from meshwright.plugin import (
    ConfigError,
    Degrees,
    IncompleteCheckpointError,
    Manifest,
    MeshSizes,
    StepResult,
    Storage,
    list_checkpoints,
    open_regular_file,
    parse_json,
    read_manifest,
    resolve,
    validate_config,
)
from meshwright_run.metrics_report import read_metrics
from meshwright_run.preflight import count_local_ranks
from meshwright_run.run_action import AUTO, NEVER
from meshwright_run.run_directory import RunDirectory
from meshwright_run.run_file import RunConfig, load_run
from meshwright_run.run_sections import CheckpointConfig, ResumeConfig

_MAX_EVENT_BYTES = 1 << 28  # Bytes of the file of events that are read


@dataclass(frozen=True)
class ReplayStart:
    """What a replay begins with: how many steps were done before, and a checkpoint; None: where the run begins."""

    completed_steps: int
    checkpoint: Storage | None


@dataclass(frozen=True)
class Rollback:
    """The run went back to `to` steps done, and left out so many batches from there."""

    to_step: int
    skipped_batches: int


class RecordedRun:
    """A run that has been done, or is being done, by its output_dir."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        paths = RunDirectory(directory)
        if not paths.run_file.is_file():
            raise ConfigError(
                f"{str(directory)!r} has no {paths.run_file.name}: it is no directory of a run. Give its output_dir."
            )
        self.config = load_run(paths.run_file)
        self.paths = RunDirectory(directory, self.config.checkpoint)
        results = read_metrics(paths.metrics, last_step=1 << 62, num_steps=self.config.steps or 0)
        self.results: Mapping[int, StepResult] = {each.step: each for each in results}
        if not self.results:
            raise ConfigError(f"{paths.metrics} has no step, so there is nothing to replay in {directory}.")

    @property
    def checkpoints(self) -> Storage:
        """The place of its checkpoints, also where the directory was moved."""
        return self.paths.checkpoint_storage

    @cached_property
    def events(self) -> Sequence[Mapping[str, Any]]:
        try:
            with open_regular_file(self.paths.events) as file:
                lines = file.read(_MAX_EVENT_BYTES).decode(errors="replace").splitlines()
        except OSError:
            return ()
        found = []
        for line in lines:
            try:
                found.append(parse_json(line))
            except ValueError:
                continue
        return tuple(event for event in found if isinstance(event, dict))

    @cached_property
    def attempt_starts(self) -> Sequence[int]:
        """The steps that were done before each attempt: 0 for the first, and then where the run resumed."""
        starts = (event.get("start_step") for event in self.events if event.get("event") == "start")
        return tuple(start for start in starts if isinstance(start, int))

    def find_rollbacks(self, replay_start: ReplayStart) -> tuple[Rollback, ...]:
        """Return where the run went back to after a beginning, in the order of steps; see [Note: abandoned steps]."""
        left: list[tuple[int, int]] = []
        for event in self.events:
            match event:
                case {"event": "start", "start_step": int(start)}:
                    left = [each for each in left if each[0] < start]
                case {"event": "bad_step", "step": int(step), "rollback_step": int(to)}:
                    left.append((to, step - to))
        found: list[Rollback] = []
        for to, batches in reversed(left):
            if to < replay_start.completed_steps:
                break
            # A run that went back further later has left out from there all that was left out until then.
            found.append(Rollback(min(to, found[-1].to_step) if found else to, batches))
        return tuple(reversed(found))

    def find_resume_step(self, step: int) -> int | None:
        """Return where the attempt that has done a step began, if it resumed."""
        # An attempt voids what earlier ones have done from its beginning on.
        started = [
            start
            for place, start in enumerate(self.attempt_starts)
            if all(start <= e for e in self.attempt_starts[place:])
        ]
        return max((start for start in started if 0 < start < step), default=None)

    def get_result(self, step: int) -> StepResult:
        if step not in self.results:
            raise ConfigError(
                f"step {step} is none of the run in {self.directory}: {self.paths.metrics.name} has steps "
                f"{min(self.results)} to {max(self.results)}. Give one of them."
            )
        return self.results[step]

    def find_start(self, step: int) -> ReplayStart:
        """Return the nearest checkpoint before a step, or the beginning of the run."""
        for place in list_checkpoints(self.checkpoints):
            manifest = _read_complete_manifest(place)
            if manifest is not None and manifest.step < step:
                return ReplayStart(manifest.step, place)
        first, named = min(self.results), self.config.resume_config.source
        if named not in (AUTO, NEVER) and first > 1:
            place = self.paths.resolve_checkpoint(named)
            manifest = read_manifest(place)
            if manifest.step < step:
                return ReplayStart(manifest.step, place)
        if first == 1:
            return ReplayStart(0, None)
        raise ConfigError(
            f"there is no whole checkpoint before step {step} in {self.checkpoints}, and the run began at "
            f"step {first}. Give a step behind a checkpoint; checkpoint.keep_last and keep_every keep more."
        )

    def get_config(self, step: int) -> RunConfig:
        """Return the run file by which a step was done; see [Note: whose run file]."""
        if self.attempt_starts and step <= self.attempt_starts[-1]:
            for place in reversed(list_checkpoints(self.checkpoints)):
                manifest = _read_complete_manifest(place)
                if manifest is not None and manifest.step >= step and "run" in manifest.extra:
                    return validate_config(RunConfig, manifest.extra["run"], where=f"the run file in {place}")
        return self.config


def _read_complete_manifest(checkpoint: Storage) -> Manifest | None:
    """The manifest of a checkpoint; None where it is incomplete."""
    try:
        return read_manifest(checkpoint)
    except IncompleteCheckpointError:
        return None


def collect_values(result: StepResult) -> dict[str, float]:
    """Return what must be the same when a step is done again, by name, causes first."""
    rates = result.learning_rates if len(result.learning_rates) > 1 else {}
    return {
        "num_tokens": result.num_tokens,
        "learning_rate": result.learning_rate,
        **{f"learning_rate of group {name}": rate for name, rate in rates.items()},
        "loss": result.loss,
        **{f"sum {name}": value for name, value in result.sums.items()},
        "grad_norm": result.grad_norm,
    }


HALF_DTYPES = ("float16", "bfloat16")
TOLERANCES = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 5e-2}
"""Relative tolerances of one step in another order of sums; correct code in float64 agrees to 1e-12."""
EPSILONS = {"float64": 2.2e-16, "float32": 1.2e-7, "bfloat16": 7.8e-3}
RESULT_FILE = "result.json"


@dataclass(frozen=True)
class ReplayRequest:
    """What is done again."""

    config: RunConfig
    world_size: int
    step: int  # the last that is done, from 1
    start: ReplayStart
    output_directory: Path  # where the first rank, or all, leave what they find
    rollbacks: tuple[Rollback, ...] = ()
    original_layout: tuple[RunConfig, int] | None = None
    changed_keys: tuple[str, ...] = ()  # keys of the model that are not those of the run
    compares_ranks: bool = False  # whether the work of each data rank is done a second time, by another
    saves_tensors: bool = False  # whether gradients, parameters and outputs of modules of the last step are kept
    results: list[dict[str, Any]] = field(default_factory=list)


ReplayRunner: TypeAlias = Callable[[ReplayRequest], dict[str, Any]]


def build_request(
    run: RecordedRun, step: int, output_directory: Path, *, world_size: int | None = None, saves_tensors: bool = False
) -> ReplayRequest:
    """Return the order to do a step again in its run's layout, on the ranks of a launcher or on new ones (None)."""
    ranks = run.get_result(step).world_size
    config, beginning = run.get_config(step), run.find_start(step)
    if world_size is None:
        _check_can_start(config, ranks, run.directory)
    elif world_size != ranks:
        raise ConfigError(
            f"step {step} of the run in {run.directory} was done on {ranks} ranks, and there are {world_size} here. "
            f"Start {ranks}, or give --single for one process."
        )
    directory = output_directory / "run"
    directory.mkdir()
    if run.paths.reference_log_probs.is_file():
        own = RunDirectory(directory)
        own.record_created_names()  # the copy counts as the replay's own, which may be replaced
        shutil.copy2(run.paths.reference_log_probs, own.reference_log_probs)
    changes = {
        "output_dir": str(directory),
        "overwrite": True,
        "nproc": ranks,
        "resume": ResumeConfig.model_validate({"from": NEVER, "allow": config.resume_config.allow}),
        "checkpoint": CheckpointConfig(),
        "trackers": [],
        "profile": None,
        "max_restarts": 0,
        "elastic": None,
        "launch": None,
    }
    went_back = run.find_rollbacks(beginning)
    return ReplayRequest(
        config.model_copy(update=changes),
        ranks,
        step,
        beginning,
        output_directory,
        went_back,
        saves_tensors=saves_tensors,
    )


def _check_can_start(config: RunConfig, ranks: int, directory: Path) -> None:
    import torch

    from meshwright.plugin import find_device

    if find_device(config.device).type != "cpu" and ranks > torch.accelerator.device_count():
        raise ConfigError(
            f"the run in {directory} was done on {ranks} ranks, and this machine has "
            f"{torch.accelerator.device_count()} accelerators ({count_local_ranks(config)} ranks would be started). "
            f"Start {ranks} by torchrun, or give --single."
        )


def resolve_degrees(config: RunConfig, world_size: int) -> Degrees:
    options, others = config.strategy_config, config.wrapper_config
    return resolve(config.strategy, config, world_size, config=options, wrapper_config=others)[1]


def to_single_process(request: ReplayRequest) -> ReplayRequest:
    """Return the order for `single`, which does the work of all data ranks in turn."""
    config, degrees = request.config, resolve_degrees(request.config, request.world_size)
    changes = {
        **{name: each.default for name, each in MeshSizes.model_fields.items()},
        "strategy": "single",
        "strategy_config": {},
        "wrapper_config": {},
        "nproc": 1,
        "micro_batch_size": config.micro_batch_size or max(1, config.batch_size // degrees.dp),
    }
    layout = (config, request.world_size)
    return replace(request, config=config.model_copy(update=changes), world_size=1, original_layout=layout)


def to_float64(request: ReplayRequest) -> ReplayRequest:
    """Return the order for float64, whatever the strategy's options say of dtypes."""
    config = request.config
    changes = {
        "model": {**config.model, "dtype": "float64"},
        "strategy_config": _drop_dtype_options(config.strategy_config),
        "wrapper_config": {name: _drop_dtype_options(each) for name, each in config.wrapper_config.items()},
    }
    return replace(request, config=config.model_copy(update=changes), changed_keys=(*request.changed_keys, "dtype"))


def _drop_dtype_options(options: Mapping[str, Any]) -> dict[str, Any]:
    others = ("mp_policy", "comm_hook", "grad_reduce_in_fp32", "offload_policy")
    return {key: value for key, value in options.items() if not key.endswith("dtype") and key not in others}


def disable_dropout(request: ReplayRequest, model: Mapping[str, Any]) -> ReplayRequest:
    """Return the order without dropout; `model` is the configuration of the run's model."""
    section, found = dict(request.config.model), find_dropout_keys(model)
    section.update(dict.fromkeys(found, 0.0))
    if isinstance(adapter := section.get("peft"), Mapping) and adapter.get("lora_dropout"):
        section["peft"] = {**adapter, "lora_dropout": 0.0}
        found = [*found, "peft"]
    return replace(
        request,
        config=request.config.model_copy(update={"model": section}),
        changed_keys=(*request.changed_keys, *found),
    )


def find_dropout_keys(model: Mapping[str, Any]) -> list[str]:
    return [key for key, value in model.items() if "drop" in key and isinstance(value, float) and value > 0]


def find_precision(config: RunConfig) -> str:
    """Return the coarsest dtype in which a run computes."""
    options, dtype = str([config.strategy_config, config.wrapper_config]), config.model.get("dtype", "float32")
    if any(each in options for each in HALF_DTYPES) or dtype in HALF_DTYPES:
        return "bfloat16"
    return dtype if dtype in ("float32", "float64") else "float32"


@contextmanager
def scratch_directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="meshwright-replay-") as directory:
        yield Path(directory)

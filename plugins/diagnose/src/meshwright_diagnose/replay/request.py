"""Requests for replays: which steps of a recorded run to repeat, from which state, and in which layout.

[Note: whose run file] A run directory holds the run file of the last attempt. A step of an earlier attempt is replayed
with the run file in the first checkpoint after it.

[Note: abandoned steps] Steps that a rollback has undone are not replayed. Their only effect is that the run skips
batches afterwards, and the replay skips the same ones. An attempt that resumes from an earlier checkpoint forgets the
rollbacks after it.

[Note: nothing is written] A replay uses the run file of the run, but another output directory, which is deleted
afterwards. Only the reference log-probabilities are copied there, since the loss of the run depends on them.

[Note: what is changed] A replay may disable dropout or use another dtype, so that two layouts with different random
numbers and orders of sums compute the same. Such changes are ignored when the settings of checkpoint and run file are
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

_MAX_EVENT_BYTES = 1 << 28  # Maximum number of bytes that are read of the event file


@dataclass(frozen=True)
class ReplayStart:
    """State that a replay starts from: number of completed steps, and checkpoint; None: the start of the run."""

    completed_steps: int
    checkpoint: Storage | None


@dataclass(frozen=True)
class Rollback:
    """A rollback of a run to the state after `to_step` steps, and the number of batches that it skips from there."""

    to_step: int
    skipped_batches: int


class RecordedRun:
    """A finished or current run, read from its output directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        paths = RunDirectory(directory)
        if not paths.run_file.is_file():
            raise ConfigError(
                f"{str(directory)!r} is not a run directory: it has no {paths.run_file.name}. Give a run's output_dir."
            )
        self.config = load_run(paths.run_file)
        self.paths = RunDirectory(directory, self.config.checkpoint)
        results = read_metrics(paths.metrics, last_step=1 << 62, num_steps=self.config.steps or 0)
        self.results: Mapping[int, StepResult] = {each.step: each for each in results}
        if not self.results:
            raise ConfigError(f"{paths.metrics} has no steps, so there is nothing to replay in {directory}.")

    @property
    def checkpoints(self) -> Storage:
        """Storage of the run's checkpoints, even if the run directory was moved."""
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
        """Number of completed steps at the start of each attempt."""
        starts = (event.get("start_step") for event in self.events if event.get("event") == "start")
        return tuple(start for start in starts if isinstance(start, int))

    def find_rollbacks(self, replay_start: ReplayStart) -> tuple[Rollback, ...]:
        """Return the rollbacks after the start of a replay, in the order of steps; see [Note: abandoned steps]."""
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
            # A later rollback to an earlier step also skips the batches that were skipped before it.
            found.append(Rollback(min(to, found[-1].to_step) if found else to, batches))
        return tuple(reversed(found))

    def find_resume_step(self, step: int) -> int | None:
        """Return the step from which the attempt that ran `step` resumed; None if it did not resume."""
        # An attempt replaces the steps of earlier attempts after its start.
        started = [
            start
            for index, start in enumerate(self.attempt_starts)
            if all(start <= later for later in self.attempt_starts[index:])
        ]
        return max((start for start in started if 0 < start < step), default=None)

    def get_result(self, step: int) -> StepResult:
        if step not in self.results:
            raise ConfigError(
                f"step {step} is not a step of the run in {self.directory}: {self.paths.metrics.name} has steps "
                f"{min(self.results)} to {max(self.results)}. Give one of them."
            )
        return self.results[step]

    def find_start(self, step: int) -> ReplayStart:
        """Return the newest complete checkpoint before a step, or the start of the run. Raises ConfigError."""
        for checkpoint in list_checkpoints(self.checkpoints):
            manifest = _read_complete_manifest(checkpoint)
            if manifest is not None and manifest.step < step:
                return ReplayStart(manifest.step, checkpoint)
        first, source = min(self.results), self.config.resume_config.source
        if source not in (AUTO, NEVER) and first > 1:
            checkpoint = self.paths.resolve_checkpoint(source)
            manifest = read_manifest(checkpoint)
            if manifest.step < step:
                return ReplayStart(manifest.step, checkpoint)
        if first == 1:
            return ReplayStart(0, None)
        raise ConfigError(
            f"there is no complete checkpoint before step {step} in {self.checkpoints}, and the run started at "
            f"step {first}. Give a step after a checkpoint; checkpoint.keep_last and keep_every keep more of them."
        )

    def get_config(self, step: int) -> RunConfig:
        """Return the run file that a step ran with; see [Note: whose run file]."""
        if self.attempt_starts and step <= self.attempt_starts[-1]:
            for checkpoint in reversed(list_checkpoints(self.checkpoints)):
                manifest = _read_complete_manifest(checkpoint)
                if manifest is not None and manifest.step >= step and "run" in manifest.extra:
                    return validate_config(RunConfig, manifest.extra["run"], where=f"the run file in {checkpoint}")
        return self.config


def _read_complete_manifest(checkpoint: Storage) -> Manifest | None:
    """Return the manifest of a checkpoint; None if the checkpoint is incomplete."""
    try:
        return read_manifest(checkpoint)
    except IncompleteCheckpointError:
        return None


def collect_values(result: StepResult) -> dict[str, float]:
    """Return the values of a step that a replay must reproduce, by name, causes before effects."""
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
"""Relative tolerances of one step with another order of sums; in float64, correct code agrees to 1e-12."""
EPSILONS = {"float64": 2.2e-16, "float32": 1.2e-7, "bfloat16": 7.8e-3}
RESULT_FILE = "result.json"


@dataclass(frozen=True)
class ReplayRequest:
    """The steps to replay, and how."""

    config: RunConfig
    world_size: int
    step: int  # the last step to replay, from 1
    start: ReplayStart
    output_directory: Path  # where the ranks write their results
    rollbacks: tuple[Rollback, ...] = ()
    original_layout: tuple[RunConfig, int] | None = None
    changed_keys: tuple[str, ...] = ()  # keys of the section `model` that differ from the run's
    compares_ranks: bool = False  # whether another rank repeats the work of each data rank
    saves_tensors: bool = False  # whether to save gradients, parameters and module outputs of the last step
    results: list[dict[str, Any]] = field(default_factory=list)


ReplayRunner: TypeAlias = Callable[[ReplayRequest], dict[str, Any]]


def build_request(
    run: RecordedRun, step: int, output_directory: Path, *, world_size: int | None = None, saves_tensors: bool = False
) -> ReplayRequest:
    """Return the request to replay a step in its layout. `world_size`: ranks of the launcher; None: start new ranks."""
    ranks = run.get_result(step).world_size
    config, start = run.get_config(step), run.find_start(step)
    if world_size is None:
        _check_can_start(config, ranks, run.directory)
    elif world_size != ranks:
        raise ConfigError(
            f"step {step} of the run in {run.directory} ran on {ranks} ranks, but there are {world_size} here. "
            f"Start {ranks} ranks, or give --single to use one process."
        )
    directory = output_directory / "run"
    directory.mkdir()
    if run.paths.reference_log_probs.is_file():
        own = RunDirectory(directory)
        own.record_created_names()  # so that the replay may replace the copy
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
    rollbacks = run.find_rollbacks(start)
    return ReplayRequest(
        config.model_copy(update=changes),
        ranks,
        step,
        start,
        output_directory,
        rollbacks,
        saves_tensors=saves_tensors,
    )


def _check_can_start(config: RunConfig, ranks: int, directory: Path) -> None:
    import torch

    from meshwright.plugin import find_device

    if find_device(config.device).type != "cpu" and ranks > torch.accelerator.device_count():
        raise ConfigError(
            f"the run in {directory} ran on {ranks} ranks, but this machine has "
            f"{torch.accelerator.device_count()} accelerators ({count_local_ranks(config)} ranks would be started). "
            f"Start {ranks} ranks with torchrun, or give --single."
        )


def resolve_degrees(config: RunConfig, world_size: int) -> Degrees:
    options, others = config.strategy_config, config.wrapper_config
    return resolve(config.strategy, config, world_size, config=options, wrapper_config=others)[1]


def to_single_process(request: ReplayRequest) -> ReplayRequest:
    """Return the request for the strategy `single`: one process does the work of all data ranks in turn."""
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
    """Return the request in float64, without the options of strategies that set dtypes."""
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
    """Return the request without dropout. `model`: the keys of the Hugging Face configuration, with their values."""
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
    """Return the dtype of lowest precision that a run uses; float16 counts as bfloat16."""
    options, dtype = str([config.strategy_config, config.wrapper_config]), config.model.get("dtype", "float32")
    if any(each in options for each in HALF_DTYPES) or dtype in HALF_DTYPES:
        return "bfloat16"
    return dtype if dtype in ("float32", "float64") else "float32"


@contextmanager
def scratch_directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="meshwright-replay-") as directory:
        yield Path(directory)

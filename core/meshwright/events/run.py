"""A run and its events besides steps, as observers get them; and trackers, observers that a run file names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from ..base.validation import FrozenModel
from ..base.version import __version__

EndReason: TypeAlias = Literal["done", "early stopping", "callback", "signal", "failed"]
"""Why a run ended: after its last step, by `EarlyStopping`, by a callback, by a signal, or by an error."""


@dataclass(frozen=True)
class RunInfo:
    """Argument of the hook `on_run_start`.

    Attributes:
        id: unique, and kept when the run is resumed.
        name: for people.
        strategy, mesh: the stack and the degrees, as text.
        start_step: number of steps done before.
        num_steps: number of the last step.
        num_parameters: of the full model, trained or not; None: unknown.
        device: kind of the ranks' devices, such as cpu or cuda.
        directory: of the run's files; None: a loop in a script.
        config: the full run file; empty for a loop in a script.
        version: of meshwright.
    """

    id: str
    name: str
    strategy: str
    mesh: str
    world_size: int
    rank: int
    start_step: int
    num_steps: int
    num_parameters: int | None
    device: str
    directory: Path | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    version: str = __version__


@dataclass(frozen=True)
class Evaluation:
    """Argument of the hook `on_evaluation`, which precedes `on_step_end` of the same step.

    Attributes:
        losses: of each evaluation set by name, as `StepResult.loss`.
        seconds: of all sets together.
    """

    step: int
    num_steps: int
    losses: Mapping[str, float]
    seconds: float
    rank: int


@dataclass(frozen=True)
class SavedCheckpoint:
    """Argument of the hook `on_checkpoint`: a checkpoint is saved, or, if asynchronous, its values are copied.

    Attributes:
        path: its directory or URL.
        seconds: for which the loop waited.
        is_best: whether it was saved because its loss is among the best.
    """

    step: int
    path: Path | str
    seconds: float
    rank: int
    is_best: bool = False


@dataclass(frozen=True)
class BadStep:
    """Argument of the hook `on_bad_step`.

    Attributes:
        step: for whose batch the optimizer did not step.
        reason: what is wrong with it.
        num_bad_steps: bad steps of the run so far, including this one.
        rollback_step: step of the checkpoint that the run goes back to; None: it continues after this step.
    """

    step: int
    num_steps: int
    reason: str
    rank: int
    num_bad_steps: int
    rollback_step: int | None = None


@dataclass(frozen=True)
class Fault:
    """Argument of the hook `on_fault`, called on each rank that an error ends, before `on_run_end`.

    Attributes:
        step: the last that was done.
        error_type: class of the error.
        message: its text.
        error_time: time of the error [s since 1970].
    """

    step: int
    rank: int
    error_type: str
    message: str
    error_time: float


@dataclass(frozen=True)
class RunSummary:
    """Argument of the hook `on_run_end`, called also when the run has failed.

    Attributes:
        step: the last that was done.
        seconds: since `on_run_start`.
        loss: of the last step; None: no step was done.
        evaluations: the last losses of the evaluation sets since `on_run_start`.
    """

    run: RunInfo
    reason: EndReason
    step: int
    num_steps: int
    seconds: float
    loss: float | None
    evaluations: Mapping[str, float]
    rank: int


@dataclass(frozen=True)
class RunSection:
    """A section of the run file that a plugin registers by the hook `register_run_sections`.

    Attributes:
        name: its key at the top level of the run file.
        config_cls: its values; at most one section has this class. Code reads them by `RunConfig.section(config_cls)`.
        description: for the JSON schema and docs.
        default: of the section if a run file has none; None: the section is null.
        redact: returns the section as it is written to the run's files and trackers: from the section as
            plain values, with what looks like a secret hidden, and from the section with all values.
    """

    name: str
    config_cls: type[FrozenModel]
    description: str
    default: FrozenModel | None = None
    redact: Callable[[dict[str, Any], Mapping[str, Any]], dict[str, Any]] = lambda hidden, whole: hidden


@dataclass(frozen=True)
class TrackerSpec:
    """A tracker that a plugin registers by the hook `register_trackers`.

    Attributes:
        name: by which a run file selects it.
        summary: one line.
        config_cls: its options.
        build: returns an observer, an object with implementations of hooks, for the first rank of a run. It may import
            the tracker's library. The observer's method `close`, if it has one, is called at the end.
        check: raises ConfigError if the tracker cannot be built with these options, for instance because its library is
            not installed; called before the ranks start, and imports nothing.
    """

    name: str
    summary: str
    config_cls: type[FrozenModel]
    build: Callable[[Any, RunInfo], Any]
    check: Callable[[Any], None] = lambda config: None

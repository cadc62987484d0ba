"""Arguments of observer hooks except steps, and what plugins register: run sections and trackers."""

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
        id: unique identifier, kept when the run is resumed.
        name: display name.
        strategy, mesh: the stack and the degrees, as text.
        start_step: number of steps completed before this attempt.
        num_steps: number of the last step.
        num_parameters: parameters of the full model, trainable or frozen; None: unknown.
        device: type of the ranks' devices, such as cpu or cuda.
        directory: directory of the run's files; None for a loop in a script.
        config: the full run file; empty for a loop in a script.
        version: version of meshwright.
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
    config: Mapping[str, Any] = field(default_factory=dict, repr=False)
    version: str = __version__


@dataclass(frozen=True)
class Evaluation:
    """Argument of the hook `on_evaluation`, which precedes `on_step_end` of the same step.

    Attributes:
        losses: loss of each evaluation set by name, as `StepResult.loss`.
        seconds: duration of all sets together.
    """

    step: int
    num_steps: int
    losses: Mapping[str, float]
    seconds: float
    rank: int


@dataclass(frozen=True)
class SavedCheckpoint:
    """Argument of the hook `on_checkpoint`: a checkpoint has been saved or, if asynchronous, its values are copied.

    Attributes:
        path: its directory or URL.
        seconds: time that the loop waited.
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
        step: number of the skipped step.
        reason: why it is bad.
        num_bad_steps: bad steps of the run so far, including this one.
        rollback_step: step of the checkpoint that the run rolls back to; None: it continues after this step.
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
        step: the last completed step.
        error_type: class of the error.
        message: text of the error.
        error_time: Unix time of the error [s].
    """

    step: int
    rank: int
    error_type: str
    message: str
    error_time: float


@dataclass(frozen=True)
class RunSummary:
    """Argument of the hook `on_run_end`, which is also called for a run that fails.

    Attributes:
        step: the last completed step.
        seconds: time since `on_run_start`.
        loss: loss of the last step; None: no step was completed.
        evaluations: the last loss of each evaluation set since `on_run_start`.
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
    """A section of the run file that a plugin registers with the hook `register_run_sections`.

    Attributes:
        name: its key at the top level of the run file.
        config_cls: class of its values, unique among sections. Read them with `RunConfig.section(config_cls)`.
        description: text for the JSON schema and docs.
        default: value of the section if a run file omits it; None: null.
        redact: returns the section as written to the run's files and to trackers. Its arguments are the section as
            JSON-serializable values, once with apparent secrets hidden and once with all values.
    """

    name: str
    config_cls: type[FrozenModel]
    description: str
    default: FrozenModel | None = None
    redact: Callable[[dict[str, Any], Mapping[str, Any]], dict[str, Any]] = lambda hidden, whole: hidden


@dataclass(frozen=True)
class TrackerSpec:
    """A tracker that a plugin registers with the hook `register_trackers`.

    Attributes:
        name: name by which a run file selects it.
        summary: one-line description.
        config_cls: class of its options.
        build: returns an observer for rank 0 of a run, an object that implements hooks. It may import the tracker's
            library. If the observer has a method `close`, it is called at the end.
        check: raises ConfigError if the tracker cannot be built with these options, for example because its library is
            not installed. It is called before the ranks start and must import nothing.
    """

    name: str
    summary: str
    config_cls: type[FrozenModel]
    build: Callable[[Any, RunInfo], Any]
    check: Callable[[Any], None] = lambda config: None

"""A run and what happens in it beside its steps, as observers get it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from ..base.version import __version__

Reason: TypeAlias = Literal["done", "early stopping", "callback", "signal", "failed"]
"""Why a run has ended: after its last step, by `EarlyStopping`, by a callback, by a signal, or by an error."""


@dataclass(frozen=True)
class RunInfo:
    """What hook `on_run_start` gets, beside the mesh.

    Attributes:
        id: the same when the run is resumed, and no other run's.
        name: for people.
        directory: where it leaves what it makes; None: a loop in a script, which has none.
        config: the run file written out, plain values; empty for a loop in a script.
        strategy, mesh: the stack and the degrees, as texts.
        start: steps that were done before; above 0 in a run that goes on.
        steps: number of the last step.
        parameters: of the whole model, trained or not; None: not known.
        device: kind of the ranks' devices, such as cpu or cuda.
        version: of meshwright.
    """

    id: str
    name: str
    strategy: str
    mesh: str
    world_size: int
    rank: int
    start: int
    steps: int
    parameters: int | None
    device: str
    directory: Path | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    version: str = __version__


@dataclass(frozen=True)
class Evaluation:
    """What hook `on_evaluation` gets, before `on_step_end` of the step that it follows.

    Attributes:
        losses: of each set by name, as `StepResult.loss` is.
        seconds: of all sets together.
    """

    step: int
    steps: int
    losses: Mapping[str, float]
    seconds: float
    rank: int


@dataclass(frozen=True)
class SavedCheckpoint:
    """What hook `on_checkpoint` gets: a checkpoint that was begun, or, where it is written while training goes on,
    whose values have been taken. One that cannot be written is told by the error that follows.

    Attributes:
        path: its directory, or its URL.
        seconds: that the loop was held up by.
        is_best: whether it was saved because its loss is among the best.
    """

    step: int
    path: Path | str
    seconds: float
    rank: int
    is_best: bool = False


@dataclass(frozen=True)
class BadStep:
    """What hook `on_bad_step` gets.

    Attributes:
        step: whose batch the optimizer did not step on.
        reason: what is wrong with it.
        back_to: the step after which the run goes on, from its checkpoint; None: it goes on after this one.
        count: bad steps of the run so far, this one included.
    """

    step: int
    steps: int
    reason: str
    rank: int
    count: int
    back_to: int | None = None


@dataclass(frozen=True)
class Fault:
    """What hook `on_fault` gets, on each rank that an error ends, before `on_run_end`.

    Attributes:
        step: the last that was done.
        kind: class of the error.
        message: its text.
        ended: when [s since 1970].
    """

    step: int
    rank: int
    kind: str
    message: str
    ended: float


@dataclass(frozen=True)
class RunSummary:
    """What hook `on_run_end` gets, also when the run has failed.

    Attributes:
        step: the last that was done.
        seconds: of this sitting, from `on_run_start` on.
        loss: of the last step; None: none was done.
        evaluations: the last losses of the sets, of this sitting.
    """

    run: RunInfo
    reason: Reason
    step: int
    steps: int
    seconds: float
    loss: float | None
    evaluations: Mapping[str, float]
    rank: int

"""Calls the hooks of observers in one call of `fit`: when it begins, what happens in it, and how it ends."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Any

from ...base.errors import TrainingError
from ...base.stopping import Stopped
from ...events.run import BadStep, Evaluation, Fault, Reason, RunInfo, RunSummary, SavedCheckpoint
from ...events.step import StepResult
from ...files.terminal import warn
from ...strategy.contract import StrategyManager
from ...strategy.registry import get_registry
from .agreed import done_on_all
from .bad_steps import Bad
from .options import Loop


class Telling:
    """Calls observers; a context manager around the steps.

    Args:
        loop: with its number of steps known.

    Attributes:
        reason: why the loop has ended, if it has not failed.
    """

    def __init__(self, manager: StrategyManager, loop: Loop) -> None:
        self._mesh, self._loop = manager.mesh, loop
        self.run = _info(manager, loop)
        self.reason: Reason = "done"
        self._last: StepResult | None = None
        self._losses: dict[str, float] = {}
        self._began = time.monotonic()

    def __enter__(self) -> Telling:
        hook, mesh = get_registry().hook, self._mesh
        done_on_all(
            mesh.world,
            lambda: hook.on_run_start(run=self.run, mesh=mesh),
            TrainingError,
            "an observer fails at the start of the run",
        )
        return self

    def step(self, result: StepResult) -> None:
        self._last = result
        get_registry().hook.on_step_end(result=result)

    def evaluation(self, result: StepResult, seconds: float) -> None:
        self._losses |= result.evaluations
        told = Evaluation(result.step, result.steps, result.evaluations, seconds, result.rank)
        get_registry().hook.on_evaluation(evaluation=told)

    def bad_step(self, bad: Bad, *, count: int, back_to: int | None = None) -> None:
        told = BadStep(bad.step, self._loop.num_steps, bad.reason, self._mesh.rank, count, back_to)
        get_registry().hook.on_bad_step(bad=told)

    def checkpoint(self, saved: SavedCheckpoint) -> None:
        get_registry().hook.on_checkpoint(checkpoint=saved)

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        hook, rank, done = get_registry().hook, self._mesh.rank, self._loop.start
        if self._last is not None:
            done = self._last.step
        if isinstance(error, Stopped):
            self.reason = "signal"
        elif error is not None:
            self.reason = "failed"
            fault = Fault(done, rank, type(error).__name__, str(error), time.time())
            _warn_of_errors(lambda: hook.on_fault(fault=fault))
        summary = RunSummary(
            run=self.run,
            reason=self.reason,
            step=done,
            steps=self._loop.num_steps,
            seconds=time.monotonic() - self._began,
            loss=None if self._last is None else self._last.loss,
            evaluations=dict(self._losses),
            rank=rank,
        )
        if error is None:
            hook.on_run_end(summary=summary)
        else:
            _warn_of_errors(lambda: hook.on_run_end(summary=summary))


def _warn_of_errors(tell: Callable[[], Any]) -> None:
    """Call observers while another error is raised, which theirs must not hide."""
    try:
        tell()
    except Exception as error:
        warn(f"an observer fails at the end of the run: {type(error).__name__}: {error}", stacklevel=2)


def _info(manager: StrategyManager, loop: Loop) -> RunInfo:
    mesh = manager.mesh
    if loop.run is not None:
        return replace(loop.run, rank=mesh.rank)
    return RunInfo(
        id=mesh.world.from_first(new_id),
        name="run",
        strategy=manager.strategy,
        mesh=str(mesh.degrees),
        world_size=mesh.world.size,
        rank=mesh.rank,
        start=loop.start,
        steps=loop.num_steps,
        parameters=None,
        device=mesh.device.type,
    )


def new_id() -> str:
    """Return an id that no other run has."""
    return uuid.uuid4().hex

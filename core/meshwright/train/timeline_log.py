"""Timelines of a pipeline, as each rank measures them now and then, in a file of each, and as they were planned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

from ..events.run import RunInfo
from ..events.step import StepResult
from ..files.terminal import warn
from ..files.writing import append, write_whole
from ..strategy.contract import StrategyManager
from ..strategy.hooks import hookimpl
from .files import PLANNED, TIMELINE


class TimelineRecorder(Protocol):
    """What a manager with a timeline has as its attribute `timeline`."""

    def record_next(self) -> None:
        """Record the next step."""

    def take(self) -> dict[str, Any] | None:
        """What was recorded, once: "time" [s since 1970], "pp_rank", and "actions", each of kind, stage, microbatch,
        start and end [s from "time"]. None: the last step was not asked for."""

    @property
    def planned(self) -> dict[str, Any]:
        """The same of all ranks along `pp`, by the schedule alone, when a step was recorded: "schedule", its "unit" of
        time, the "bubble" from 0 to 1, and "ranks", the actions of each."""


class TimelineLog:
    """A rank's observer that asks for timelines and writes them. A disk that takes none is told once in a warning.

    Args:
        directory: of the run.
        rank: of this process.
        every: steps between those that are recorded.
    """

    def __init__(self, recorder: TimelineRecorder, directory: Path, *, rank: int, every: int) -> None:
        self._recorder, self._directory = recorder, directory / TIMELINE
        self._rank, self._every = rank, every
        self._has_planned = self._is_off = False

    @hookimpl
    def on_run_start(self, run: RunInfo) -> None:
        self._ask(run.start + 1)

    @hookimpl
    def on_step_end(self, result: StepResult) -> None:
        found = self._recorder.take()
        if found is not None and not self._is_off:
            try:
                self._write({"step": result.step, **found})
            except OSError as error:
                self._is_off = True
                warn(f"{self._directory} cannot be written: {error}. The run goes on without it.", stacklevel=2)
        self._ask(result.step + 1)

    def _ask(self, step: int) -> None:
        if step % self._every == 0 and not self._is_off:
            self._recorder.record_next()

    def _write(self, line: dict[str, Any]) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        if self._rank == 0 and not self._has_planned:
            write_whole(self._directory / PLANNED, json.dumps(self._recorder.planned) + "\n")
            self._has_planned = True
        append(self._directory / f"rank-{self._rank:05}.jsonl", json.dumps(line) + "\n")


def timeline_logs(manager: StrategyManager, directory: Path, every: int | None) -> list[TimelineLog]:
    """The observer of this rank, where the run asks for timelines and its strategy has such; none elsewhere."""
    recorder: TimelineRecorder | None = getattr(manager, "timeline", None)
    if recorder is None or every is None:
        return []
    return [TimelineLog(recorder, directory, rank=manager.mesh.rank, every=every)]

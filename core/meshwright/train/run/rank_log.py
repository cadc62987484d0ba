"""Files that each rank writes by itself: its times and memory by step, and timelines of a pipeline."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from ...events.run import RunInfo, RunSummary
from ...events.step import StepResult
from ...files.terminal import warn
from ...files.writing import append, write_whole
from ...strategy.contract import StrategyManager
from ...strategy.hooks import hookimpl
from .run_directory import RunDirectory

FLUSHED_AFTER_S = 2.0
"""Lines are written together, so that a shared file system sees few writes of many ranks."""


class RankLog:
    """Observer of a rank's own steps. A disk that takes nothing is reported once in a warning, and ends no run.

    Args:
        path: of the file.
        clock: tells seconds.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock = path, clock
        self._lines: list[str] = []
        self._written_at, self._is_off = clock(), False

    @hookimpl
    def on_step_end(self, result: StepResult) -> None:
        told = {
            "step": result.step,
            "time": result.ended,
            "seconds": result.seconds,
            "times": dict(result.times),
            "memory": dict(result.memory),
        }
        self._lines.append(json.dumps(told) + "\n")
        if self._clock() - self._written_at >= FLUSHED_AFTER_S:
            self._write()

    @hookimpl
    def on_run_end(self, summary: RunSummary) -> None:
        self._write()

    def _write(self) -> None:
        self._written_at = self._clock()
        lines, self._lines = self._lines, []
        if self._is_off or not lines:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            append(self._path, "".join(lines))
        except OSError as error:
            self._is_off = True
            warn(f"{self._path} cannot be written: {error}. The run goes on without it.", stacklevel=2)


class TimelineRecorder(Protocol):
    """The attribute `timeline` of a manager that has timelines."""

    def record_next(self) -> None:
        """Record the next step."""

    def take(self) -> dict[str, Any] | None:
        """Return what was recorded, once: "time" [s since 1970], "pp_rank", and "actions", each of kind, stage,
        microbatch, start and end [s from "time"]. None: the last step was not recorded."""

    @property
    def planned(self) -> dict[str, Any]:
        """The schedule of all ranks along `pp`, once a step was recorded: "schedule", its "unit" of time, the "bubble"
        from 0 to 1, and "ranks", the actions of each."""


class TimelineLog:
    """Observer of a rank that records timelines and writes them. A disk that takes none is reported once in a warning.

    Args:
        directory: of the run.
        every: steps between those that are recorded.
    """

    def __init__(self, recorder: TimelineRecorder, directory: Path, *, rank: int, every: int) -> None:
        self._recorder, self._directory = recorder, RunDirectory(directory)
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
                warn(
                    f"{self._directory.timeline} cannot be written: {error}. The run goes on without it.", stacklevel=2
                )
        self._ask(result.step + 1)

    def _ask(self, step: int) -> None:
        if step % self._every == 0 and not self._is_off:
            self._recorder.record_next()

    def _write(self, line: dict[str, Any]) -> None:
        self._directory.timeline.mkdir(parents=True, exist_ok=True)
        if self._rank == 0 and not self._has_planned:
            write_whole(self._directory.planned, json.dumps(self._recorder.planned) + "\n")
            self._has_planned = True
        append(self._directory.timeline / f"rank-{self._rank:05}.jsonl", json.dumps(line) + "\n")


def timeline_logs(manager: StrategyManager, directory: Path, every: int | None) -> list[TimelineLog]:
    """Return the observer of this rank, if the run asks for timelines and its strategy has them."""
    recorder: TimelineRecorder | None = getattr(manager, "timeline", None)
    if recorder is None or every is None:
        return []
    return [TimelineLog(recorder, directory, rank=manager.mesh.rank, every=every)]

"""Times and memory of each rank, in a file of its own: no rank waits for another to tell them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

from ..events.run import RunSummary
from ..events.step import StepResult
from ..files.terminal import warn
from ..files.writing import append
from ..strategy.hooks import hookimpl
from .files import RANKS

FLUSHED_AFTER_S = 2.0
"""Lines are written together, so that a shared file system sees few writes of many ranks."""


def rank_file(directory: Path, rank: int) -> Path:
    """Where a rank of a run writes."""
    return directory / RANKS / f"{rank:05}.jsonl"


class RankLog:
    """A rank's observer of its own steps. A disk that takes nothing is told once in a warning, and ends no run.

    Args:
        directory: of the run.
        rank: of this process.
        clock: tells seconds.
    """

    def __init__(self, directory: Path, rank: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock = rank_file(directory, rank), clock
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

"""The base of the trackers: an observer that forwards numbers, notes and the end of a run."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping

from meshwright.plugin import Fault, Reason, RunSummary, SavedCheckpoint, StepResult, hookimpl

from .metrics import checkpoint_metrics, outcome, step_metrics


class Tracker(ABC):
    """An observer on the first rank of a run, whose constructor opens or resumes the run of its library.

    Args:
        config: options of the tracker.
        run: the run to log.
    """

    _has_ended = False

    @abstractmethod
    def log(self, values: Mapping[str, float], *, step: int, ended: float) -> None:
        """Log numbers of a step by name, possibly infinite or NaN, known at `ended` [s since 1970]."""

    @abstractmethod
    def note(self, name: str, text: str, *, step: int) -> None:
        """Log a text; the last one of a name matters most."""

    @abstractmethod
    def end(self, reason: Reason, facts: Mapping[str, str | float]) -> None:
        """Log how the run has ended, and store everything."""

    def close(self) -> None:
        """End the run as failed if its end was not reported."""
        if not self._has_ended:
            self._has_ended = True
            self.end("failed", {})

    @hookimpl
    def on_step_end(self, result: StepResult) -> None:
        self.log(step_metrics(result), step=result.step, ended=result.ended)

    @hookimpl
    def on_checkpoint(self, checkpoint: SavedCheckpoint) -> None:
        self.log(checkpoint_metrics(checkpoint), step=checkpoint.step, ended=time.time())
        self.note("checkpoint/last", str(checkpoint.path), step=checkpoint.step)
        if checkpoint.is_best:
            self.note("checkpoint/best", str(checkpoint.path), step=checkpoint.step)

    @hookimpl
    def on_fault(self, fault: Fault) -> None:
        self.note("fault", f"{fault.kind}: {fault.message}", step=fault.step)

    @hookimpl
    def on_run_end(self, summary: RunSummary) -> None:
        self._has_ended = True
        self.end(summary.reason, outcome(summary))

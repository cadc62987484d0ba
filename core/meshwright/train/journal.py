"""What has happened to a run, a line of JSON each, and which run it is.

The file tells of all sittings, also of steps that were done again after one was killed: nothing in it is taken back. A
run that is resumed is known by the id that the first line has.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..events.run import BadStep, Evaluation, Fault, RunInfo, RunSummary, SavedCheckpoint
from ..events.step import StepResult
from ..files.parsing import open_regular, parse_json
from ..files.terminal import warn
from ..files.writing import append
from ..strategy.hooks import hookimpl
from .files import EVENTS
from .report import NewStragglers, without_nan
from .telling import new_id

_LONGEST = 1 << 20
"""Bytes of a line that is read."""


def id_of(directory: Path) -> str:
    """Of the run that a directory is of, or a new one where nothing tells."""
    try:
        with open_regular(directory / EVENTS) as file:
            known = parse_json(file.readline(_LONGEST).decode())["id"]
    except (OSError, ValueError, KeyError, TypeError):
        return new_id()
    return known if isinstance(known, str) and known else new_id()


def note(directory: Path, event: str, **values: Any) -> None:
    """Add a line. A disk that takes none is told in a warning, and ends no run."""
    Journal(directory).note(event, **values)


class Journal:
    """The first rank's observer that writes them. A disk that takes none is told once.

    Args:
        directory: of the run.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / EVENTS
        self._has_told = False
        self._stragglers = NewStragglers()

    def note(self, event: str, **values: Any) -> None:
        """Add a line, as far as the disk takes it."""
        try:
            append(self._path, json.dumps({"time": time.time(), "event": event, **values}, default=str) + "\n")
        except OSError as error:
            if not self._has_told:
                warn(f"{self._path} cannot be written: {error}. The run goes on.", stacklevel=2)
            self._has_told = True

    @hookimpl
    def on_run_start(self, run: RunInfo) -> None:
        told = {name: value for name, value in vars(run).items() if name not in ("config", "directory", "rank")}
        self.note("start", **told)

    @hookimpl
    def on_step_end(self, result: StepResult) -> None:
        for each in self._stragglers.of(result):
            self.note("straggler", step=result.step, **without_nan(each))

    @hookimpl
    def on_evaluation(self, evaluation: Evaluation) -> None:
        self.note("evaluation", **{**asdict(evaluation), "losses": without_nan(evaluation.losses)})

    @hookimpl
    def on_bad_step(self, bad: BadStep) -> None:
        self.note("bad step", **asdict(bad))

    @hookimpl
    def on_checkpoint(self, checkpoint: SavedCheckpoint) -> None:
        self.note("checkpoint", **asdict(checkpoint))

    @hookimpl
    def on_fault(self, fault: Fault) -> None:
        self.note("fault", **asdict(fault))

    @hookimpl
    def on_run_end(self, summary: RunSummary) -> None:
        told = {name: value for name, value in vars(summary).items() if name != "run"}
        self.note("end", **{**told, "evaluations": without_nan(summary.evaluations)})

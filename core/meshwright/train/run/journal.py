"""What happens to a run, a line of JSON each, and what a hang leaves behind.

The file covers all attempts, also steps that were done again after one was killed. Its first line has the run's id.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...events.run import BadStep, Evaluation, Fault, RunInfo, RunSummary, SavedCheckpoint
from ...events.step import StepResult
from ...files.parsing import open_regular, parse_json
from ...files.terminal import warn
from ...files.writing import append, write_whole
from ...mesh.progress import Counts, Hang, Sign
from ...profile.faults import FaultFiles
from ...strategy.hooks import hookimpl
from ..loop.telling import new_id
from .report import NewStragglers, without_nan
from .run_directory import RunDirectory

_LONGEST = 1 << 20
"""Bytes of a line that is read."""


def id_of(events: Path) -> str:
    """Return the id of the run that a file of events is of, or a new one."""
    try:
        with open_regular(events) as file:
            known = parse_json(file.readline(_LONGEST).decode())["id"]
    except (OSError, ValueError, KeyError, TypeError):
        return new_id()
    return known if isinstance(known, str) and known else new_id()


def note(events: Path, event: str, **values: Any) -> None:
    """Add a line. A disk that takes none is reported in a warning, and ends no run."""
    Journal(events).note(event, **values)


class Journal:
    """Observer on the first rank that writes the lines. A disk that takes none is reported once."""

    def __init__(self, events: Path) -> None:
        self._path = events
        self._has_told = False
        self._stragglers = NewStragglers()

    def note(self, event: str, **values: Any) -> None:
        """Add a line, if the disk takes it."""
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


class HangFiles:
    """Writes down a hang on one rank; see `meshwright.mesh.progress.Witness`."""

    def __init__(self, directory: RunDirectory, rank: int) -> None:
        self._directory, self._rank = directory, rank
        self.where = str(directory.faults)

    def leave(self, sign: Sign) -> Counts:
        text = f"step {sign.at.step}, phase {sign.at.phase}, at {sign.place}"
        fault = Fault(sign.at.step, self._rank, "Hang", text, time.time())
        return FaultFiles(self._directory.path, self._rank).write(fault, cpp_stacks=False)

    def tell(self, hang: Hang) -> None:
        if hang.is_silent:
            for rank in hang.ranks:
                self._write_last_stack(rank, hang)
        for rank in hang.ranks:
            sign = hang.signs.get(rank)
            at = {} if sign is None else {"step": sign.at.step, "phase": sign.at.phase, "place": sign.place}
            process = None if sign is None else sign.process
            at |= {"process": process, "since": hang.since, "is_silent": hang.is_silent}
            note(self._directory.events, "hang", rank=rank, **at)

    def _write_last_stack(self, rank: int, hang: Hang) -> None:
        """Write the main thread's stack of a rank that cannot do so itself, from its last sign."""
        sign = hang.signs.get(rank)
        if sign is None:
            return
        lines = (f"  {frame}" for frame in sign.stack)
        text = "\n".join([f"Main thread, as of the last sign (most recent call first): {sign.process}", *lines])
        path = FaultFiles(self._directory.path, rank).stacks
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text + "\n")

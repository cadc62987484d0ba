"""What a hang leaves behind: files of each rank that lives, and a line in the run's events."""

from __future__ import annotations

import time
from pathlib import Path

from ..events.run import Fault
from ..files.writing import write_whole
from ..mesh.progress import Counts, Hang, Sign
from ..profile.faults import FaultFiles
from ..profile.files import FAULTS
from .journal import note


class HangFiles:
    """The witness of a run file's run on one rank; see `meshwright.mesh.progress.Witness`.

    Args:
        directory: of the run.
        rank: of this process.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        self._directory, self._rank = directory, rank
        self.where = str(directory / FAULTS)

    def leave(self, sign: Sign) -> Counts:
        text = f"step {sign.at.step}, phase {sign.at.phase}, at {sign.place}"
        fault = Fault(sign.at.step, self._rank, "Hang", text, time.time())
        return FaultFiles(self._directory, self._rank).write(fault, cpp_stacks=False)

    def tell(self, hang: Hang) -> None:
        if hang.is_silent:
            for rank in hang.ranks:
                self._last_sign(rank, hang)
        for rank in hang.ranks:
            sign = hang.signs.get(rank)
            at = {} if sign is None else {"step": sign.at.step, "phase": sign.at.phase, "place": sign.place}
            process = None if sign is None else sign.process
            note(self._directory, "hang", rank=rank, **at, process=process, since=hang.since, is_silent=hang.is_silent)

    def _last_sign(self, rank: int, hang: Hang) -> None:
        """Of a rank that can write nothing itself, what its last sign had: its main thread's stack."""
        sign = hang.signs.get(rank)
        if sign is None:
            return
        lines = (f"  {frame}" for frame in sign.stack)
        text = "\n".join([f"Main thread, as of the last sign (most recent call first): {sign.process}", *lines])
        path = FaultFiles(self._directory, rank).stacks
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text + "\n")

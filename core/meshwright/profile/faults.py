"""What a rank leaves behind when an error ends its run: its last collectives, and where its threads were."""

from __future__ import annotations

import faulthandler
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .._compat.profiling import flight_records
from ..events.run import Fault
from ..files.writing import write_whole, written_whole
from ..strategy.hooks import hookimpl
from .files import FAULTS


class FaultFiles:
    """An observer of a rank's own fault; until then it does nothing.

    In output_dir/faults are then, of each rank that fails:
        rank-00000.json           the fault, and the last collectives that torch's flight recorder knows: kind, group,
                                  sizes, when begun, and whether they are over ("retired")
        rank-00000-gloo.pickle    the same as torch writes it, for its own tools; -nccl of NCCL
        rank-00000-stacks.txt     where each thread was in Python

    Args:
        directory: of the run.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        self._directory, self._name = directory / FAULTS, f"rank-{rank:05}"

    @property
    def stacks(self) -> Path:
        return self._directory / f"{self._name}-stacks.txt"

    @hookimpl
    def on_fault(self, fault: Fault) -> None:
        self.write(fault)

    def write(self, fault: Fault, *, cpp_stacks: bool = True) -> dict[str, tuple[int, int, int]]:
        """Leave them behind.

        Args:
            cpp_stacks: whether torch looks up where its collectives were called, which takes seconds.

        Returns:
            How many collectives of each process group this rank has enqueued, has seen begin and has seen end.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        with written_whole(self.stacks) as file:
            faulthandler.dump_traceback(file, all_threads=True)
        told = {}
        for backend, as_json, as_pickle in flight_records(with_stacks=cpp_stacks):
            write_whole(self._directory / f"{self._name}-{backend}.pickle", as_pickle)
            told[backend] = json.loads(as_json)
        text = json.dumps({"fault": asdict(fault), "collectives": told}, indent=1) + "\n"
        write_whole(self._directory / f"{self._name}.json", text)
        return {group: counts for record in told.values() for group, counts in _counts(record).items()}


def _counts(record: dict[str, Any]) -> dict[str, tuple[int, int, int]]:
    """By the name of a group, which is the same on all of its ranks; where the record names it."""
    names = {str(entry["pg_id"]): entry["process_group"][0] for entry in record.get("entries", ())}
    kinds = ("last_enqueued_collective", "last_started_collective", "last_completed_collective")
    return {
        names[number]: (int(status[kinds[0]]), int(status[kinds[1]]), int(status[kinds[2]]))
        for number, status in record.get("pg_status", {}).items()
        if number in names
    }

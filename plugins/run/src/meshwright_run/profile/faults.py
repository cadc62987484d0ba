"""Files that a rank leaves when an error ends its run: its last collectives, and where its threads were."""

from __future__ import annotations

import faulthandler
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from meshwright.plugin import Fault, hookimpl, write_whole, written_whole

from ._compat import flight_records
from .config import FAULTS


class FaultFiles:
    """An observer that writes files to output_dir/faults when this rank fails.

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
        """Write the files, and count the collectives that this rank has enqueued, started and completed, by group.

        `cpp_stacks`: whether torch looks up where its collectives were called, which takes seconds.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        with written_whole(self.stacks) as file:
            faulthandler.dump_traceback(file, all_threads=True)
        records = {}
        for backend, as_json, as_pickle in flight_records(with_stacks=cpp_stacks):
            write_whole(self._directory / f"{self._name}-{backend}.pickle", as_pickle)
            records[backend] = json.loads(as_json)
        text = json.dumps({"fault": asdict(fault), "collectives": records}, indent=1) + "\n"
        write_whole(self._directory / f"{self._name}.json", text)
        return {group: counts for record in records.values() for group, counts in _counts(record).items()}


def _counts(record: dict[str, Any]) -> dict[str, tuple[int, int, int]]:
    """Count by the name of a group, which is the same on all of its ranks, where the record has it."""
    names = {str(entry["pg_id"]): entry["process_group"][0] for entry in record.get("entries", ())}
    enqueued, started, completed = (f"last_{each}_collective" for each in ("enqueued", "started", "completed"))
    return {
        names[number]: (int(status[enqueued]), int(status[started]), int(status[completed]))
        for number, status in record.get("pg_status", {}).items()
        if number in names
    }

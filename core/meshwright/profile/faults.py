"""What a rank leaves behind when an error ends its run: its last collectives, and where its threads were."""

from __future__ import annotations

import faulthandler
import json
from dataclasses import asdict
from pathlib import Path

from .._compat.profiling import flight_records
from ..events.run import Fault
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
        self._directory, self._rank = directory / FAULTS, rank

    @hookimpl
    def on_fault(self, fault: Fault) -> None:
        name = f"rank-{self._rank:05}"
        self._directory.mkdir(parents=True, exist_ok=True)
        with (self._directory / f"{name}-stacks.txt").open("w", encoding="utf-8") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        told = {}
        for backend, as_json, as_pickle in flight_records():
            (self._directory / f"{name}-{backend}.pickle").write_bytes(as_pickle)
            told[backend] = json.loads(as_json)
        text = json.dumps({"fault": asdict(fault), "collectives": told}, indent=1) + "\n"
        (self._directory / f"{name}.json").write_text(text, encoding="utf-8")

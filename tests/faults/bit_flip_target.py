"""`meshwright train` in which a bit flips where a file says so, as a cosmic ray has it.

    python -c "import bit_flip_target; bit_flip_target.main()" RUN.yaml FILE

FILE, "RANK PLACE", has that rank flip one bit after its next step, and remove the file. PLACE is parameter, optimizer,
or gradient: that one between clipping and the optimizer's step. Started by torchrun, this is a rank.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from bit_flips import find_first_gradient, find_first_state_tensor, flip_tensor_bit
from torch import Tensor

from meshwright.base.processes import exit_process
from meshwright.events.step import StepResult
from meshwright.strategy.contract import StrategyManager
from meshwright.strategy.hooks import hookimpl
from meshwright.strategy.registry import get_registry
from meshwright_run import run_rank as run
from meshwright_run import start as starting
from meshwright_run.run_file import load_run

FLIP_FILE_VARIABLE = "MESHWRIGHT_TEST_FLIP"
RUN_RANK, FIT = run.run_rank, run.fit


class BitFlipper:
    """Flips bits of what this rank holds."""

    def __init__(self, manager: StrategyManager) -> None:
        self._manager, self._read = manager, manager.read_scalars
        manager.read_scalars = self.read  # type: ignore[method-assign]

    @hookimpl
    def on_step_end(self, result: StepResult) -> None:
        place = self._requested_place()
        if place in ("parameter", "optimizer"):
            self._flip(
                find_first_state_tensor(self._manager, {"parameter": "model.", "optimizer": "optimizer."}[place])
            )

    def read(self, *values: Tensor) -> list[float]:
        """What a step reads after it has clipped, before the optimizer steps."""
        found = self._read(*values)
        if self._requested_place() == "gradient" and (gradient := find_first_gradient(self._manager)) is not None:
            self._flip(gradient)
        return found

    def _requested_place(self) -> str:
        """Where this rank is to flip a bit now; empty: nowhere."""
        try:
            rank, place = Path(os.environ[FLIP_FILE_VARIABLE]).read_text().split()
        except (OSError, ValueError):
            return ""
        return place if rank == os.environ["RANK"] else ""

    def _flip(self, tensor: Tensor) -> None:
        Path(os.environ[FLIP_FILE_VARIABLE]).unlink()
        flip_tensor_bit(tensor)


def fit_with_flips(manager: StrategyManager, *arguments: Any) -> Any:
    with get_registry().observing(BitFlipper(manager)):
        return FIT(manager, *arguments)


def run_rank_with_flips(*arguments: Any) -> None:
    """What each rank does."""
    run.fit = fit_with_flips  # type: ignore[attr-defined]
    RUN_RANK(*arguments)


def main() -> None:
    run_file, file = sys.argv[1:]
    os.environ[FLIP_FILE_VARIABLE] = file
    starting.run_rank = run_rank_with_flips  # type: ignore[attr-defined]
    exit_process(starting.start_run(load_run(run_file)))


if __name__ == "__main__":
    main()

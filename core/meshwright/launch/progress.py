"""What the main thread of a rank writes down of its run, for the thread that gives signs; see [Note: positions]."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from .position import PATIENT, At

if TYPE_CHECKING:
    from .hang import Witness
    from .signs import Sign

MOST_STEPS = 1000
"""Of which a rank's own seconds are held."""


class Progress:
    """A rank's position. Each write is the assignment of one value, so that there is no lock; no clock is read.

    Attributes:
        at: where the main thread is.
        steps: of the last steps, the rank's own seconds and those of the whole step.
        signs: of all ranks, as the first rank has read them last; each time a new mapping.
        witness: of this rank, once the run has a directory to write to.
        on_settled: called once, when the second step begins, from where on less silence is borne.
    """

    def __init__(self) -> None:
        self.at = At()
        self.steps: deque[tuple[float, float]] = deque(maxlen=MOST_STEPS)
        self.signs: Mapping[int, Sign] = {}
        self.witness: Witness | None = None
        self.on_settled: Callable[[], object] = lambda: None
        self._step = self._part = self._begun = 0
        self._known: set[str] = set()

    def begin(self, step: int, phase: str) -> None:
        """A step begins, counted from 1, and with it a phase."""
        self._step, self._part = step, 0
        self._begun += 1
        self.enter(phase)
        if self._begun == 2:
            self.on_settled()

    def enter(self, phase: str) -> None:
        """A phase begins."""
        self._known.add(self.at.phase)
        self._part += 1
        patient = phase in PATIENT or phase not in self._known
        self.at = At(self._step, self._part, phase, 0, self._begun > 1, patient)

    def move(self) -> None:
        """A microbatch is done."""
        step, part, phase, moves, settled, patient = self.at
        self.at = At(step, part, phase, moves + 1, settled, patient)

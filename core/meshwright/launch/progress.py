"""Where the main thread of a rank is in its run: written by that thread alone, read by the one that gives signs.

[Note: positions] All ranks of a run go through the same phases in the same order, so that the number of a phase within
its step tells who is behind. What counts as movement is a phase that begins, and within one a microbatch.

[Note: what is slow once] What a run does for the first time may compile, load or fill caches, and what it does when it
saves or exports lies with a file system. Nobody is taken for standing still then: `timeout_s` holds, as without a
watchdog. Before its first step is done a rank may also be silent for as long, since much that loads holds the
interpreter.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from .process_identity import identity_of

if TYPE_CHECKING:
    from .hang import Witness
    from .signs import Sign

STARTING = "starting"
PATIENT = frozenset({STARTING, "save", "exporting"})
"""Phases in which a rank may stand still."""
MOST_STEPS = 1000
"""Of which a rank's own seconds are held."""


class At(NamedTuple):
    """A position; see [Note: positions].

    Attributes:
        step: from 1; 0 before the first.
        part: number of the phase within the step.
        moves: microbatches that were done in the phase.
        settled: whether a step has been done, in this sitting.
        patient: whether the rank may stand still; see [Note: what is slow once].
    """

    step: int = 0
    part: int = 0
    phase: str = STARTING
    moves: int = 0
    settled: bool = False
    patient: bool = True


class Progress:
    """A rank's position. Each write is the assignment of one value, so that there is no lock; no clock is read.

    Attributes:
        at: where the main thread is.
        identity: of this process, see `process_identity`.
        steps: of the last steps, the rank's own seconds and those of the whole step.
        signs: of all ranks, as the first rank has read them last; each time a new mapping.
        witness: of this rank, once the run has a directory to write to.
    """

    def __init__(self) -> None:
        self.at = At()
        self.identity = identity_of(os.getpid())
        self.steps: deque[tuple[float, float]] = deque(maxlen=MOST_STEPS)
        self.signs: Mapping[int, Sign] = {}
        self.witness: Witness | None = None
        self._step = self._part = self._begun = 0
        self._known: set[str] = set()

    def begin(self, step: int, phase: str) -> None:
        """A step begins, counted from 1, and with it a phase."""
        self._step, self._part = step, 0
        self._begun += 1
        self.enter(phase)

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

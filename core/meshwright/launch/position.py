"""Where the main thread of a rank is in its run.

[Note: positions] All ranks of a run go through the same phases in the same order, so that the number of a phase within
its step tells who is behind. What counts as movement is a phase that begins, and within one a microbatch.

[Note: what is slow once] What a run does for the first time may compile, load or fill caches, and what it does when it
saves or exports lies with a file system. Nobody is taken for standing still then: `timeout_s` holds, as without a
watchdog. Before its first step is done a rank may also be silent for as long, since much that loads holds the
interpreter.
"""

from __future__ import annotations

from typing import NamedTuple

STARTING = "starting"
PATIENT = frozenset({STARTING, "save", "exporting"})
"""Phases in which a rank may stand still."""


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

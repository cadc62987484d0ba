"""Where each rank is in its run: its position, the sign of life that it writes, and a hang that is found by these.

[Note: positions] All ranks go through the same phases in the same order, so the number of a phase within its step tells
which rank is behind. A rank may stand still for `timeout_s` in what it does for the first time, saves or exports;
before the end of its first step it may also be silent, since much that loads holds the interpreter's lock.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

STARTING = "starting"
PATIENT = frozenset({STARTING, "save", "exporting"})
"""Phases in which a rank may stand still."""
MOST_STEPS = 1000
"""Steps of which a rank keeps its own seconds."""
Counts: TypeAlias = Mapping[str, tuple[int, int, int]]
"""By process group: how many collectives a rank has enqueued, started and finished."""


class At(NamedTuple):
    """A position; see [Note: positions]. `settled`: a step is finished; `patient`: the rank may stand still."""

    step: int = 0
    part: int = 0
    phase: str = STARTING
    moves: int = 0
    settled: bool = False
    patient: bool = True


@dataclass(frozen=True)
class Sign:
    """Sign of life of one rank.

    Attributes:
        waits: whether its main thread is in torch's communication.
        place: file, line and function of its main thread, outside of torch; `stack`: all, the innermost first.
        still_s: for how long its position has not changed.
        own_s, step_s: medians over its last `steps` of its own time, and of the whole step; 0: not known.
    """

    count: int
    process: str
    waits: bool
    place: str
    interval_s: float
    at: At = field(default_factory=At)
    still_s: float = 0.0
    stack: tuple[str, ...] = ()
    own_s: float = 0.0
    step_s: float = 0.0
    steps: int = 0

    @classmethod
    def read(cls, text: bytes | str) -> Sign:
        values = json.loads(text)
        return cls(**{**values, "at": At(*values["at"]), "stack": tuple(values["stack"])})

    def written(self) -> str:
        return json.dumps(vars(self))


@dataclass(frozen=True)
class Hang:
    """Ranks that are silent or stand still since a time [s]; `is_alone`: the store does not answer."""

    ranks: tuple[int, ...]
    is_silent: bool
    since: float
    signs: Mapping[int, Sign]
    text: str
    is_alone: bool = False


class Witness(Protocol):
    """Writes down on each rank what is known of a hang; `where` is the place, for people."""

    where: str

    def leave(self, sign: Sign) -> Counts:
        """Write down this process's stacks and its last collectives; return how far these have come."""

    def tell(self, hang: Hang) -> None:
        """Write down what has been found; on one rank."""


class Progress:
    """Position of this rank. Each write assigns one value, so there is no lock; no clock is read.

    `steps` holds the rank's own seconds and those of the whole step; `signs` are those that the first rank read last;
    `on_settled` is called once, when the second step begins, from which on the limit of silence is lower.
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
        self._step, self._part = step, 0
        self._begun += 1
        self.enter(phase)
        if self._begun == 2:
            self.on_settled()

    def enter(self, phase: str) -> None:
        self._known.add(self.at.phase)
        self._part += 1
        patient = phase in PATIENT or phase not in self._known
        self.at = At(self._step, self._part, phase, 0, self._begun > 1, patient)

    def move(self) -> None:
        self.at = self.at._replace(moves=self.at.moves + 1)

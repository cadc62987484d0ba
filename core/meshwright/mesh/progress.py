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
SLOW_PHASES = frozenset({STARTING, "save", "exporting"})
"""Phases in which a rank may stand still."""
MAX_STEP_TIMES = 1000
"""Steps of which a rank keeps its own seconds."""
CollectiveCounts: TypeAlias = Mapping[str, tuple[int, int, int]]
"""By process group: how many collectives a rank has enqueued, started and finished."""


class TrainingPhase(NamedTuple):
    """A position; see [Note: positions]. `settled`: a step is finished; `patient`: the rank may stand still."""

    step: int = 0
    part: int = 0
    phase: str = STARTING
    moves: int = 0
    settled: bool = False
    patient: bool = True


@dataclass(frozen=True)
class HeartbeatRecord:
    """Sign of life of one rank.

    Attributes:
        waits: whether its main thread is in torch's communication.
        place: file, line and function of its main thread, outside of torch; `stack`: all, the innermost first.
        stalled_s: for how long its position has not changed.
        busy_s, step_s: medians over its last `steps` of its own time, and of the whole step; 0: not known.
    """

    count: int
    process: str
    waits: bool
    place: str
    interval_s: float
    at: TrainingPhase = field(default_factory=TrainingPhase)
    still_s: float = 0.0
    stack: tuple[str, ...] = ()
    own_s: float = 0.0
    step_s: float = 0.0
    steps: int = 0

    @classmethod
    def read(cls, text: bytes | str) -> HeartbeatRecord:
        values = json.loads(text)
        return cls(**{**values, "at": TrainingPhase(*values["at"]), "stack": tuple(values["stack"])})

    def written(self) -> str:
        return json.dumps(vars(self))


@dataclass(frozen=True)
class Hang:
    """Ranks that are silent or stand still since a time [s]; `is_store_down`: the store does not answer."""

    ranks: tuple[int, ...]
    is_silent: bool
    since: float
    signs: Mapping[int, HeartbeatRecord]
    text: str
    is_alone: bool = False


class HangReporter(Protocol):
    """Writes down on each rank what is known of a hang; `where` is the place, for people."""

    where: str

    def leave(self, heartbeat: HeartbeatRecord) -> CollectiveCounts:
        """Write down this process's stacks and its last collectives; return how far these have come."""

    def tell(self, hang: Hang) -> None:
        """Write down what has been found; on one rank."""


class Progress:
    """Position of this rank. Each write assigns one value, so there is no lock; no clock is read.

    `steps` holds the rank's own seconds and those of the whole step; `signs` are those that the first rank read last;
    `on_warmed_up` is called once, when the second step begins, from which on the limit of silence is lower.
    """

    def __init__(self) -> None:
        self.at = TrainingPhase()
        self.steps: deque[tuple[float, float]] = deque(maxlen=MAX_STEP_TIMES)
        self.signs: Mapping[int, HeartbeatRecord] = {}
        self.witness: HangReporter | None = None
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
        patient = phase in SLOW_PHASES or phase not in self._known
        self.at = TrainingPhase(self._step, self._part, phase, 0, self._begun > 1, patient)

    def move(self) -> None:
        self.at = self.at._replace(moves=self.at.moves + 1)

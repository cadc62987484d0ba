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
SLOW_PHASES = frozenset({STARTING, "save", "export"})
"""Phases in which a rank may stand still."""
MAX_STEP_TIMES = 1000
"""Steps of which a rank keeps its own seconds."""
CollectiveCounts: TypeAlias = Mapping[str, tuple[int, int, int]]
"""By process group: how many collectives a rank has enqueued, started and finished."""


class TrainingPhase(NamedTuple):
    """A position; see [Note: positions]. `settled`: a step is finished; `patient`: the rank may stand still."""

    step: int = 0
    phase_index: int = 0
    name: str = STARTING
    num_ticks: int = 0
    is_warmed_up: bool = False
    may_stall: bool = True


@dataclass(frozen=True)
class HeartbeatRecord:
    """Sign of life of one rank.

    Attributes:
        is_communicating: whether its main thread is in torch's communication.
        location: file, line and function of its main thread, outside of torch; `stack`: all, the innermost first.
        stalled_s: for how long its position has not changed.
        busy_s, step_s: medians over its last `num_steps` of its own time, and of the whole step; 0: not known.
    """

    sequence_number: int
    process: str
    is_communicating: bool
    location: str
    interval_s: float
    phase: TrainingPhase = field(default_factory=TrainingPhase)
    stalled_s: float = 0.0
    stack: tuple[str, ...] = ()
    busy_s: float = 0.0
    step_s: float = 0.0
    num_steps: int = 0

    @classmethod
    def from_json(cls, text: bytes | str) -> HeartbeatRecord:
        values = json.loads(text)
        return cls(**{**values, "phase": TrainingPhase(*values["phase"]), "stack": tuple(values["stack"])})

    def to_json(self) -> str:
        return json.dumps(vars(self))


@dataclass(frozen=True)
class Hang:
    """Ranks that are silent or stand still since a time [s]; `is_store_down`: the store does not answer."""

    ranks: tuple[int, ...]
    is_silent: bool
    since_s: float
    heartbeats: Mapping[int, HeartbeatRecord]
    message: str
    is_store_down: bool = False


class HangReporter(Protocol):
    """Writes down on each rank what is known of a hang; `where` is the place, for people."""

    location: str

    def dump_stacks(self, heartbeat: HeartbeatRecord) -> CollectiveCounts:
        """Write down this process's stacks and its last collectives; return how far these have come."""

    def report(self, hang: Hang) -> None:
        """Write down what has been found; on one rank."""


class Progress:
    """Position of this rank. Each write assigns one value, so there is no lock; no clock is read.

    `steps` holds the rank's own seconds and those of the whole step; `signs` are those that the first rank read last;
    `on_warmed_up` is called once, when the second step begins, from which on the limit of silence is lower.
    """

    def __init__(self) -> None:
        self.phase = TrainingPhase()
        self.step_times: deque[tuple[float, float]] = deque(maxlen=MAX_STEP_TIMES)
        self.heartbeats: Mapping[int, HeartbeatRecord] = {}
        self.hang_reporter: HangReporter | None = None
        self.on_warmed_up: Callable[[], object] = lambda: None
        self._step = self._phase_index = self._num_steps_started = 0
        self._seen_phases: set[str] = set()

    def begin_step(self, step: int, phase: str) -> None:
        self._step, self._phase_index = step, 0
        self._num_steps_started += 1
        self.enter_phase(phase)
        if self._num_steps_started == 2:
            self.on_warmed_up()

    def enter_phase(self, phase: str) -> None:
        self._seen_phases.add(self.phase.name)
        self._phase_index += 1
        patient = phase in SLOW_PHASES or phase not in self._seen_phases
        self.phase = TrainingPhase(self._step, self._phase_index, phase, 0, self._num_steps_started > 1, patient)

    def tick(self) -> None:
        self.phase = self.phase._replace(num_ticks=self.phase.num_ticks + 1)

"""Progress of each rank in its run: its training phase, its heartbeat, and hangs that heartbeats reveal.

[Note: positions] All ranks go through the same phases in the same order, so the index of a phase within its step shows
which rank is behind. In a phase that it enters for the first time, and in saves and exports, a rank may stall for
`timeout_s`. Before the end of its first step it may also miss heartbeats, since loading code often holds the GIL.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

STARTING = "starting"
SLOW_PHASES = frozenset({STARTING, "save", "export"})
"""Phases in which a rank may stall."""
MAX_STEP_TIMES = 1000
"""Number of steps whose times a rank keeps."""
CollectiveCounts: TypeAlias = Mapping[str, tuple[int, int, int]]
"""By process group: the numbers of collectives that a rank has enqueued, started and finished."""


class TrainingPhase(NamedTuple):
    """A rank's position; see [Note: positions].

    `is_warmed_up`: the first step is finished; `may_stall`: the rank may stall in this phase.
    """

    step: int = 0
    phase_index: int = 0
    name: str = STARTING
    num_ticks: int = 0
    is_warmed_up: bool = False
    may_stall: bool = True


@dataclass(frozen=True)
class HeartbeatRecord:
    """Heartbeat of one rank.

    Attributes:
        is_communicating: whether the main thread is in torch's communication code.
        location: file, line and function of the main thread, outside of torch.
        stack: all frames of the main thread, innermost first.
        stalled_s: time since its position last changed [s].
        busy_s, step_s: medians of busy time and of step time over the last `num_steps` steps [s]; 0: unknown.
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
    """Ranks that have missed heartbeats or stalled since the Unix time `since_s` [s].

    `is_silent`: heartbeats are missing; `is_store_down`: the store does not respond.
    """

    ranks: tuple[int, ...]
    is_silent: bool
    since_s: float
    heartbeats: Mapping[int, HeartbeatRecord]
    message: str
    is_store_down: bool = False


class HangReporter(Protocol):
    """Record a hang on each rank; `location` describes for users where it is recorded."""

    location: str

    def dump_stacks(self, heartbeat: HeartbeatRecord) -> CollectiveCounts:
        """Record this process's stacks and its last collectives; return its collective counts."""

    def report(self, hang: Hang) -> None:
        """Record the hang; called on one rank."""


class Progress:
    """Progress of this rank. Each write assigns one value, so no lock is needed; no clock is read.

    `step_times` holds busy time and step time [s]; `heartbeats` are those that rank 0 read last. `on_warmed_up` is
    called once, when the second step begins and the limit for missed heartbeats becomes lower.
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

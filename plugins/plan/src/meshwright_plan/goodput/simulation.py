"""Model failures, checkpoints and restarts of a run, and find the best checkpoint interval. Times are in seconds.

[Note: what fails] Each rank fails at random, at a constant rate, and a failure stops the run. Some failures destroy the
memory of a node, and a few of these also that of the node that holds its replicas, or whose replicas it holds.

[Note: replicas] Each rank may also send its state to the memory of a rank on another node, from which a run resumes. A
disk is read if a node and its replicas are lost together: at once, or the second while the run recovers from the first.

[Note: saving] A save blocks the loop while the state is copied, then is written while training continues, and is usable
once it is written. The next save waits until then.

[Note: closed form] A run is a sequence of independent attempts. Let M be the mean time between failures and D the time
from a failure to the next step; an attempt takes M exp(D / M) on average. Let T be the time of the steps between saves,
each of which blocks for d and is written w later. An attempt leaves exp(-(T + d + w) / M) / (1 - exp(-P / M)) saves,
where P is the time from one save to the next: T + d, or more if a save waits for another. T times the saves, divided by
the time of an attempt, is the goodput. With w = 0 this is Daly's complete model. If no save waits for another, the best
T depends on neither D nor w.
Sources: Young, A first order approximation to the optimum checkpoint interval, CACM 17(9), 1974; Daly, A higher order
estimate of the optimum checkpoint interval for restart dumps, Future Generation Computer Systems 22(3), 2006.

[Note: simulation] Between failures, a run repeats steps, replicas and saves at fixed intervals, so its state follows
from the time since the last failure. A simulation takes one iteration per failure, however many steps there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from meshwright.plugin import ConfigError

NODE_FAILURE_FRACTION = 0.78
"""Fraction of the failures that take down a node: hardware failures of Llama 3 (The Llama 3 Herd of Models,
arXiv:2407.21783, section 3.3.4)."""
PAIR_FAILURE_FRACTION = (
    0.01  # Fraction that takes down a node and its replicas: assumed, for nodes that share neither power nor a switch
)
HOUR = 3600.0


@dataclass(frozen=True)
class CheckpointSchedule:
    """Checkpoints on disk, one every `every` steps; see [Note: saving]."""

    every: int
    blocking_s: float  # time that a save blocks the loop
    write_s: float = 0.0  # time until it is then written
    load_s: float = 0.0  # time until all ranks have read one


@dataclass(frozen=True)
class ReplicaSchedule:
    """Replicas in the memory of another node; see [Note: replicas]. `every` divides the interval of the checkpoints."""

    every: int
    blocking_s: float
    send_s: float = 0.0
    load_s: float = 0.0


@dataclass(frozen=True)
class FailureScenario:
    """A run whose ranks fail; see [Note: what fails]."""

    ranks: int
    ranks_per_node: int
    step_s: float
    checkpoints: CheckpointSchedule
    failures_per_rank_hour: float
    detection_s: float = 0.0  # time until a failure is detected
    restart_s: float = 0.0  # time from the detection until the ranks run again, without loading
    replicas: ReplicaSchedule | None = None
    node_failure_fraction: float = NODE_FAILURE_FRACTION  # fraction of the failures that destroy the memory of a node
    pair_failure_fraction: float = PAIR_FAILURE_FRACTION  # fraction that destroy that of a node and its replicas

    def __post_init__(self) -> None:
        if not 0 <= self.pair_failure_fraction <= self.node_failure_fraction <= 1:
            raise ConfigError(
                f"pair_failure_fraction={self.pair_failure_fraction} must be at most "
                f"node_failure_fraction={self.node_failure_fraction}, and both must be "
                f"from 0 to 1."
            )
        if self.replicas is None:
            return
        if self.nodes < 2:
            raise ConfigError(
                f"{self.ranks} ranks are on one node, but replicas need a second node. Omit the replicas."
            )
        if self.checkpoints.every % self.replicas.every:
            raise ConfigError(
                f"checkpoints every {self.checkpoints.every} steps and replicas every {self.replicas.every} do not "
                "coincide; make the first interval a multiple of the second."
            )
        if self.replicas.send_s > self.replicas.every * self.step_s:
            raise ConfigError(
                f"a replica takes {self.replicas.send_s:.3g} s to send, but the next one follows after "
                f"{self.replicas.every * self.step_s:.3g} s; replicate every "
                f"{math.ceil(self.replicas.send_s / self.step_s)} "
                f"steps or more."
            )

    @property
    def nodes(self) -> int:
        return math.ceil(self.ranks / self.ranks_per_node)

    @property
    def mtbf_s(self) -> float:
        """Mean time between failures of the run; infinite without failures."""
        rate = self.ranks * self.failures_per_rank_hour
        return HOUR / rate if rate else math.inf

    @property
    def recovery_interval(self) -> int:
        """Steps between states from which the run can resume."""
        return self.checkpoints.every if self.replicas is None else self.replicas.every

    @property
    def checkpoint_wait_s(self) -> float:
        """Time that a save waits until the previous one is written. The first save does not wait."""
        copying = (
            0.0 if self.replicas is None else self.replicas.blocking_s * (self.checkpoints.every // self.replicas.every)
        )
        return max(0.0, self.checkpoints.write_s - self.checkpoints.every * self.step_s - copying)

    def downtime_s(self, *, from_disk: bool) -> float:
        """Return the time from a failure to the next step, without further failures."""
        source = self.checkpoints if from_disk or self.replicas is None else self.replicas
        return self.detection_s + self.restart_s + source.load_s

    def with_checkpoints(self, every: int, replicas: ReplicaSchedule | None = None) -> FailureScenario:
        return replace(self, checkpoints=replace(self.checkpoints, every=every), replicas=replicas)


def young_interval(blocking_s: float, mtbf_s: float) -> float:
    """Return the time between two saves that loses the least, by Young's first-order formula."""
    return math.sqrt(2 * blocking_s * mtbf_s)


def daly_interval(blocking_s: float, mtbf_s: float) -> float:
    """Return the same by Daly's higher-order formula, for saves that are not short compared to `mtbf_s`."""
    if blocking_s >= 2 * mtbf_s:
        return mtbf_s
    part = blocking_s / (2 * mtbf_s)
    return young_interval(blocking_s, mtbf_s) * (1 + math.sqrt(part) / 3 + part / 9) - blocking_s


def compute_goodput(scenario: FailureScenario) -> float:
    """Return the goodput of a long run without replicas; see [Note: closed form]."""
    saves, mtbf = scenario.checkpoints, scenario.mtbf_s
    steps = saves.every * scenario.step_s
    period = steps + saves.blocking_s + scenario.checkpoint_wait_s
    if math.isinf(mtbf):
        return steps / period
    try:
        cycle = mtbf * math.exp(scenario.downtime_s(from_disk=True) / mtbf)
    except OverflowError:
        return 0.0
    kept = math.exp(-(steps + saves.blocking_s + saves.write_s) / mtbf) / -math.expm1(-period / mtbf)
    return steps * kept / cycle


def find_best_interval(scenario: FailureScenario) -> int:
    """Return the steps between saves with the highest goodput without replicas, such that no save waits for another."""
    saves, mtbf = scenario.checkpoints, scenario.mtbf_s
    least = max(1, math.ceil(saves.write_s / scenario.step_s))
    if math.isinf(mtbf):
        raise ValueError("a run that never fails has no best interval.")

    def at(every: int) -> float:
        return compute_goodput(scenario.with_checkpoints(every))

    every = max(least, round(daly_interval(saves.blocking_s, mtbf) / scenario.step_s))
    # Daly's interval is nearly optimal, and the goodput has a single maximum.
    while at(every + 1) > at(every):
        every += 1
    while every > least and at(every - 1) >= at(every):
        every -= 1
    return every


FloatArray: TypeAlias = NDArray[Any]
DAY = 24 * HOUR
TIME_PARTS = ("useful", "recomputed", "replicas", "checkpoints", "detection", "restart", "loading")


@dataclass(frozen=True)
class SimulationResult:
    """Fractions of the time by `TIME_PARTS`, failures, and restores from disk; each of shape (scenarios, runs)."""

    parts: dict[str, FloatArray]
    failures: FloatArray
    disk_restores: FloatArray

    @property
    def goodput(self) -> FloatArray:
        mean: FloatArray = self.parts["useful"].mean(axis=1)
        return mean

    @property
    def standard_error(self) -> FloatArray:
        useful = self.parts["useful"]
        found: FloatArray = useful.std(axis=1, ddof=1) / np.sqrt(useful.shape[1])
        return found

    def mean_parts(self, scenario: int = 0) -> dict[str, float]:
        """Return the parts of one scenario, averaged over its runs."""
        return {name: float(each[scenario].mean()) for name, each in self.parts.items()}


def simulate(
    scenarios: Sequence[FailureScenario], seconds: float | Sequence[float], *, num_runs: int = 64, seed: int = 0
) -> SimulationResult:
    """Simulate `num_runs` runs of each scenario for `seconds`; all scenarios share the same random numbers."""
    if not scenarios or num_runs < 1 or not np.all(np.asarray(seconds) > 0):
        raise ConfigError(
            f"nothing to simulate: {len(scenarios)} scenarios, num_runs={num_runs}, seconds={seconds}; all must be > 0."
        )
    running = _Simulation(scenarios, np.broadcast_to(np.asarray(seconds, float), len(scenarios)), num_runs)
    chance = np.random.default_rng(seed)
    while not running.is_over.all():
        # Time of the next failure, its kind, and the node that a second failure takes down.
        running.run_attempt(chance.standard_exponential(num_runs), chance.random(num_runs), chance.random(num_runs))
    return running.build_result()


class _Simulation:
    """State of all runs, each at its own time. Arrays: (scenarios, runs), or (scenarios, 1) for scenario constants."""

    def __init__(self, fleets: Sequence[FailureScenario], seconds: FloatArray, runs: int) -> None:
        def zeros() -> FloatArray:
            return np.zeros((len(fleets), runs))

        def column(value: Callable[[FailureScenario], float]) -> FloatArray:
            return np.array([[value(each)] for each in fleets], float)

        self.seconds = seconds
        self.steps_s = column(lambda each: each.recovery_interval * each.step_s)
        self.replica_blocking = column(lambda each: each.replicas.blocking_s if each.replicas else 0.0)
        self.replica_send = column(lambda each: each.replicas.send_s if each.replicas else 0.0)
        self.rounds_per_checkpoint = column(lambda each: each.checkpoints.every // each.recovery_interval)
        self.checkpoint_blocking = column(lambda each: each.checkpoints.blocking_s)
        self.checkpoint_wait = column(lambda each: each.checkpoint_wait_s)
        self.checkpoint_write = column(lambda each: each.checkpoints.write_s)
        self.round_s = self.steps_s + self.replica_blocking
        self.period = self.rounds_per_checkpoint * self.round_s + self.checkpoint_blocking + self.checkpoint_wait
        self.mtbf = column(lambda each: each.mtbf_s)
        self.detection, self.restart = column(lambda each: each.detection_s), column(lambda each: each.restart_s)
        self.disk_downtime = column(lambda each: each.downtime_s(from_disk=True))
        self.memory_downtime = column(lambda each: each.downtime_s(from_disk=False))
        self.node_fraction = column(lambda each: each.node_failure_fraction)
        self.pair_fraction = column(lambda each: each.pair_failure_fraction)
        self.has_replicas = column(lambda each: each.replicas is not None) > 0
        self.num_other_nodes = np.maximum(column(lambda each: each.nodes - 1), 1)
        self.spent = {name: zeros() for name in TIME_PARTS}
        self.remaining = zeros() + seconds[:, None]
        self.rounds_done, self.rounds_on_disk, self.downtime, self.lost_nodes = zeros(), zeros(), zeros(), zeros()
        self.has_memory_state = zeros() == 0
        self.failures, self.disk_restores, self.is_over = zeros(), zeros(), zeros() > 0

    def _advance(
        self, start_round: FloatArray, elapsed: FloatArray
    ) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
        """Return seconds of steps, seconds of replicas, replicated rounds and rounds on disk, `elapsed` seconds after
        round `start_round`."""
        until_save = self.rounds_per_checkpoint - start_round
        first = until_save * self.round_s + self.checkpoint_blocking
        saves = np.where(elapsed < first, 0.0, 1 + np.floor((elapsed - first) / self.period))
        since = elapsed - np.where(saves > 0, first + (saves - 1) * self.period, 0.0)
        full_rounds = np.minimum(
            np.floor(since / self.round_s), np.where(saves > 0, self.rounds_per_checkpoint, until_save)
        )
        rest = since - full_rounds * self.round_s
        is_saving = full_rounds == np.where(saves > 0, self.rounds_per_checkpoint, until_save)
        stepping = np.where(is_saving, 0.0, np.minimum(rest, self.steps_s))
        rounds = np.where(saves > 0, until_save + (saves - 1) * self.rounds_per_checkpoint, 0.0) + full_rounds
        # The last replica before a save was sent before the save blocked, and before it waited.
        under_way = np.where(
            full_rounds > 0, rest, since + self.checkpoint_blocking + np.where(saves > 1, self.checkpoint_wait, 0.0)
        )
        written = saves - ((saves > 0) & (since < self.checkpoint_write))
        return (
            rounds * self.steps_s + stepping,
            rounds * self.replica_blocking + np.where(is_saving, 0.0, rest - stepping),
            rounds - ((rounds > 0) & (under_way < self.replica_send)),
            np.where(written > 0, until_save + (written - 1) * self.rounds_per_checkpoint, 0.0),
        )

    def run_attempt(self, time_to_failure: FloatArray, kind: FloatArray, second_failure: FloatArray) -> None:
        """Run until the next failure, in units of the mean time between failures. All arguments have shape (runs,)."""
        time_to_failure = time_to_failure * self.mtbf
        ends = time_to_failure >= self.remaining
        lasts = np.minimum(time_to_failure, self.remaining)
        self.remaining = np.where(ends, 0.0, self.remaining - lasts)
        waited = np.minimum(lasts, self.downtime)
        ran = lasts - waited
        computed, copying, in_memory, saved = self._advance(self.rounds_done % self.rounds_per_checkpoint, ran)
        noticing = np.minimum(waited, self.detection)
        starting = np.minimum(waited - noticing, self.restart)
        spent = self.spent
        spent["detection"] += noticing
        spent["restart"] += starting
        spent["loading"] += waited - noticing - starting
        spent["replicas"] += copying
        spent["checkpoints"] += ran - computed - copying
        spent["recomputed"] += computed  # all computed steps; `build_result` subtracts the useful ones
        self.rounds_on_disk = np.where(saved > 0, self.rounds_done + saved, self.rounds_on_disk)
        fails = ~ends
        still_down = fails & (lasts < self.downtime)
        is_node = kind < self.node_fraction
        meets = still_down & is_node & (second_failure < 2 * self.lost_nodes / self.num_other_nodes)
        is_lost = ~self.has_replicas | (kind < self.pair_fraction) | meets | (still_down & ~self.has_memory_state)
        now = np.where(is_lost, self.rounds_on_disk, self.rounds_done + in_memory)
        kept = np.where(fails, now * self.steps_s, self.rounds_done * self.steps_s + computed)
        spent["useful"] = np.where(self.is_over, spent["useful"], kept)
        self.rounds_done = np.where(fails, now, self.rounds_done)
        self.lost_nodes = np.where(still_down, self.lost_nodes, 0) + is_node + (kind < self.pair_fraction)
        self.has_memory_state = ~is_lost
        self.downtime = np.where(is_lost, self.disk_downtime, self.memory_downtime)
        self.failures += fails
        self.disk_restores += fails & is_lost
        self.is_over |= ends

    def build_result(self) -> SimulationResult:
        parts = dict(self.spent, recomputed=self.spent["recomputed"] - self.spent["useful"])
        total = self.seconds[:, None]
        return SimulationResult({name: each / total for name, each in parts.items()}, self.failures, self.disk_restores)

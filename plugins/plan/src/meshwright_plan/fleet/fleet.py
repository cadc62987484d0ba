"""Ranks that fail, what a run does about it (save, and restart), and how often to save. Times are in seconds.

[Note: what fails] Each rank fails at random, at a constant rate, and the run with it. Some failures take the node with
the contents of its memory, and few of those also the node that has its copies, or whose copies it has.

[Note: copies] Besides saving to disk, each rank may send its state to the memory of a rank on another node, from which
a run resumes. A disk is read where a node and its copies are lost together, at once or one while the run waits for the
other.

[Note: saving] A save blocks the loop while the state is copied, and is written while training continues. It exists when
it is written. The next save waits for that.

[Note: closed form] Failures have no memory, so a run is a sequence of independent attempts. One lasts M seconds on
average, the mean time between failures, and begins when the D seconds from a failure to the next step have passed
without another one: all in all M exp(D / M). With T seconds of steps between two saves, each of which blocks for d and
is written w seconds later, attempts leave on average exp(-(T + d + w) / M) / (1 - exp(-P / M)) saves, where P is the
time from one to the next: T + d, or more where a save waits for the one before. So T times that over the first is the
goodput. With w = 0 it is Daly's complete model, whose best T depends on neither D nor w.
Sources: Young, A first order approximation to the optimum checkpoint interval, CACM 17(9), 1974; Daly, A higher order
estimate of the optimum checkpoint interval for restart dumps, Future Generation Computer Systems 22(3), 2006.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from meshwright.plugin import ConfigError

NODES = 0.78
"""Part of the failures that takes a node: those of hardware, as of Llama 3 (The Llama 3 Herd of Models,
arXiv:2407.21783, section 3.3.4)."""
PAIRS = 0.01
"""Part that takes a node and its copies together: assumed, of nodes that share neither power nor a switch."""
HOUR = 3600.0


@dataclass(frozen=True)
class Saves:
    """Checkpoints on disk, each `every` so many steps; see [Note: saving].

    Attributes:
        hold_s: for which one blocks the loop.
        write_s: in which it is then written.
        load_s: until all ranks have read one.
    """

    every: int
    hold_s: float
    write_s: float = 0.0
    load_s: float = 0.0


@dataclass(frozen=True)
class Copies:
    """Copies in the memory of another node, as `Saves`; see [Note: copies]. `every` divides that of the saves."""

    every: int
    hold_s: float
    send_s: float = 0.0
    load_s: float = 0.0


@dataclass(frozen=True)
class Fleet:
    """A run on ranks that fail; see [Note: what fails].

    Attributes:
        detection_s: until a failure is noticed.
        restart_s: from then until the ranks are there again, without reading.
        node_share: part of the failures that takes the memory of a node.
        pair_share: part that takes that of a node and its copies.

    Raises:
        ConfigError: intervals and times do not go together.
    """

    ranks: int
    ranks_per_node: int
    step_s: float
    saves: Saves
    failures_per_rank_hour: float
    detection_s: float = 0.0
    restart_s: float = 0.0
    copies: Copies | None = None
    node_share: float = NODES
    pair_share: float = PAIRS

    def __post_init__(self) -> None:
        if not 0 <= self.pair_share <= self.node_share <= 1:
            raise ConfigError(
                f"pair_share={self.pair_share} of the failures is a part of node_share={self.node_share}, and both are "
                f"from 0 to 1."
            )
        if self.copies is None:
            return
        if self.nodes < 2:
            raise ConfigError(f"{self.ranks} ranks are on one node, and copies are for another one. Leave them out.")
        if self.saves.every % self.copies.every:
            raise ConfigError(
                f"saves every {self.saves.every} steps and copies every {self.copies.every} do not meet; make the "
                f"first a multiple of the second."
            )
        if self.copies.send_s > self.copies.every * self.step_s:
            raise ConfigError(
                f"a copy takes {self.copies.send_s:.3g} s to send, and the next one comes after "
                f"{self.copies.every * self.step_s:.3g} s; copy every {math.ceil(self.copies.send_s / self.step_s)} "
                f"steps, or more."
            )

    @property
    def nodes(self) -> int:
        return math.ceil(self.ranks / self.ranks_per_node)

    @property
    def mtbf_s(self) -> float:
        """Mean time between failures of the run."""
        rate = self.ranks * self.failures_per_rank_hour
        return HOUR / rate if rate else math.inf

    @property
    def copied_every(self) -> int:
        """Steps between states from which the run may resume."""
        return self.saves.every if self.copies is None else self.copies.every

    @property
    def wait_s(self) -> float:
        """Time for which a save waits for the one before it to be written; the first of all waits for none."""
        copying = 0.0 if self.copies is None else self.copies.hold_s * (self.saves.every // self.copies.every)
        return max(0.0, self.saves.write_s - self.saves.every * self.step_s - copying)

    def down_s(self, *, from_disk: bool) -> float:
        """Return the time from a failure to the next step, if nothing fails meanwhile."""
        source = self.saves if from_disk or self.copies is None else self.copies
        return self.detection_s + self.restart_s + source.load_s

    def saving(self, every: int, copies: Copies | None = None) -> Fleet:
        """Return the fleet with other intervals."""
        return replace(self, saves=replace(self.saves, every=every), copies=copies)


def young(hold_s: float, mtbf_s: float) -> float:
    """Return the seconds of steps between two saves that lose the least, in first order."""
    return math.sqrt(2 * hold_s * mtbf_s)


def daly(hold_s: float, mtbf_s: float) -> float:
    """Return the same in higher order, for saves that are not short compared with the time between failures."""
    if hold_s >= 2 * mtbf_s:
        return mtbf_s
    part = hold_s / (2 * mtbf_s)
    return young(hold_s, mtbf_s) * (1 + math.sqrt(part) / 3 + part / 9) - hold_s


def goodput(fleet: Fleet) -> float:
    """Return the useful part of a long run's time, without copies in memory; see [Note: closed form]."""
    saves, mtbf = fleet.saves, fleet.mtbf_s
    steps = saves.every * fleet.step_s
    period = steps + saves.hold_s + fleet.wait_s
    if math.isinf(mtbf):
        return steps / period
    try:
        cycle = mtbf * math.exp(fleet.down_s(from_disk=True) / mtbf)
    except OverflowError:
        return 0.0
    kept = math.exp(-(steps + saves.hold_s + saves.write_s) / mtbf) / -math.expm1(-period / mtbf)
    return steps * kept / cycle


def best_every(fleet: Fleet) -> int:
    """Return the steps between saves at which a run without copies in memory has the most goodput.

    Not fewer than are trained while a save is written, so that none waits for the one before.
    """
    saves, mtbf = fleet.saves, fleet.mtbf_s
    least = max(1, math.ceil(saves.write_s / fleet.step_s))
    if math.isinf(mtbf):
        raise ValueError("a run that never fails has no best interval.")

    def at(every: int) -> float:
        return goodput(fleet.saving(every))

    every = max(least, round(daly(saves.hold_s, mtbf) / fleet.step_s))
    # Daly's is off by little, and the goodput has a single maximum.
    while at(every + 1) > at(every):
        every += 1
    while every > least and at(every - 1) >= at(every):
        every -= 1
    return every

"""Simulated runs on ranks that fail, many at the same time.

Between two failures a run does what it would do without any: it waits until its ranks are there, then repeats steps,
copies and saves evenly until it is cut off. So its state follows from the time since the failure, and the simulation
takes as many rounds as there are failures, however many steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from meshwright.plugin import ConfigError

from .fleet import HOUR, Fleet

Numbers: TypeAlias = NDArray[Any]
DAY = 24 * HOUR
PARTS = ("useful", "redone", "copies", "saves", "detection", "restart", "reading")


@dataclass(frozen=True)
class Outcome:
    """Parts of the whole time by name as in `PARTS`, failures, and those that read a disk; each (fleets, runs)."""

    parts: dict[str, Numbers]
    failures: Numbers
    from_disk: Numbers

    @property
    def goodput(self) -> Numbers:
        """Useful part of the time, by fleet."""
        mean: Numbers = self.parts["useful"].mean(axis=1)
        return mean

    @property
    def error(self) -> Numbers:
        """Standard error of `goodput`."""
        useful = self.parts["useful"]
        found: Numbers = useful.std(axis=1, ddof=1) / np.sqrt(useful.shape[1])
        return found

    def means(self, fleet: int = 0) -> dict[str, float]:
        """Return the parts of one fleet, each the mean over its runs."""
        return {name: float(each[fleet].mean()) for name, each in self.parts.items()}


def simulate(fleets: Sequence[Fleet], seconds: float | Sequence[float], *, runs: int = 64, seed: int = 0) -> Outcome:
    """Simulate `runs` runs of each fleet for so many seconds, all with the same failures.

    Raises:
        ConfigError: no fleet, no time or no run is given.
    """
    if not fleets or runs < 1 or not np.all(np.asarray(seconds) > 0):
        raise ConfigError(f"nothing to simulate: {len(fleets)} fleets, runs={runs}, seconds={seconds}; all above 0.")
    running = _Running(fleets, np.broadcast_to(np.asarray(seconds, float), len(fleets)), runs)
    chance = np.random.default_rng(seed)
    while not running.over.all():
        # The time of the next failure, its kind, and the node that a second one takes.
        running.attempt(chance.standard_exponential(runs), chance.random(runs), chance.random(runs))
    return running.outcome()


class _Running:
    """All runs, each at its own time; arrays are (fleets, runs), or (fleets, 1) for numbers of a fleet.

    A round is from one copy to the next, or one save without copies. The current attempt resumes from round `at`, after
    `down` seconds; `on_disk` is the round of the last save that is written.
    """

    def __init__(self, fleets: Sequence[Fleet], seconds: Numbers, runs: int) -> None:
        def zeros() -> Numbers:
            return np.zeros((len(fleets), runs))

        def column(value: Callable[[Fleet], float]) -> Numbers:
            return np.array([[value(each)] for each in fleets], float)

        self.seconds = seconds
        self.of_steps = column(lambda each: each.copied_every * each.step_s)
        self.copy_hold = column(lambda each: each.copies.hold_s if each.copies else 0.0)
        self.send = column(lambda each: each.copies.send_s if each.copies else 0.0)
        self.rounds = column(lambda each: each.saves.every // each.copied_every)
        self.hold, self.wait = column(lambda each: each.saves.hold_s), column(lambda each: each.wait_s)
        self.write = column(lambda each: each.saves.write_s)
        self.round = self.of_steps + self.copy_hold
        self.period = self.rounds * self.round + self.hold + self.wait
        self.mtbf = column(lambda each: each.mtbf_s)
        self.detection, self.restart = column(lambda each: each.detection_s), column(lambda each: each.restart_s)
        self.down_disk = column(lambda each: each.down_s(from_disk=True))
        self.down_memory = column(lambda each: each.down_s(from_disk=False))
        self.node, self.pair = column(lambda each: each.node_share), column(lambda each: each.pair_share)
        self.copies = column(lambda each: each.copies is not None) > 0
        self.others = np.maximum(column(lambda each: each.nodes - 1), 1)
        self.spent = {name: zeros() for name in PARTS}
        self.left = zeros() + seconds[:, None]
        self.at, self.on_disk, self.down, self.lost_nodes = zeros(), zeros(), zeros(), zeros()
        self.has_memory = zeros() == 0
        self.failures, self.from_disk, self.over = zeros(), zeros(), zeros() > 0

    def _place(self, begun: Numbers, ran: Numbers) -> tuple[Numbers, Numbers, Numbers, Numbers]:
        """Return where an attempt is after `ran` seconds that began `begun` rounds after a save.

        Seconds of steps, and of copies that block; rounds whose copies have arrived, and until the last written save.
        """
        until_save = self.rounds - begun
        first = until_save * self.round + self.hold
        saves = np.where(ran < first, 0.0, 1 + np.floor((ran - first) / self.period))
        since = ran - np.where(saves > 0, first + (saves - 1) * self.period, 0.0)
        whole = np.minimum(np.floor(since / self.round), np.where(saves > 0, self.rounds, until_save))
        rest = since - whole * self.round
        is_saving = whole == np.where(saves > 0, self.rounds, until_save)
        stepping = np.where(is_saving, 0.0, np.minimum(rest, self.of_steps))
        before = np.where(saves > 0, until_save + (saves - 1) * self.rounds, 0.0)
        rounds = before + whole
        # The last copy before a save was there before the save blocked, and before it waited.
        under_way = np.where(whole > 0, rest, since + self.hold + np.where(saves > 1, self.wait, 0.0))
        written = saves - ((saves > 0) & (since < self.write))
        return (
            rounds * self.of_steps + stepping,
            rounds * self.copy_hold + np.where(is_saving, 0.0, rest - stepping),
            rounds - ((rounds > 0) & (under_way < self.send)),
            np.where(written > 0, until_save + (written - 1) * self.rounds, 0.0),
        )

    def attempt(self, until: Numbers, kind: Numbers, second: Numbers) -> None:
        """Run until the next failure, or the end.

        Args:
            until: the failure, in mean times between failures, (runs,).
            kind, second: uniform in [0, 1), (runs,).
        """
        until = until * self.mtbf
        ends = until >= self.left
        lasts = np.minimum(until, self.left)
        self.left = np.where(ends, 0.0, self.left - lasts)
        waited = np.minimum(lasts, self.down)
        ran = lasts - waited
        computed, copying, in_memory, saved = self._place(self.at % self.rounds, ran)
        noticing = np.minimum(waited, self.detection)
        starting = np.minimum(waited - noticing, self.restart)
        spent = self.spent
        spent["detection"] += noticing
        spent["restart"] += starting
        spent["reading"] += waited - noticing - starting
        spent["copies"] += copying
        spent["saves"] += ran - computed - copying
        # All that was computed; `outcome` subtracts what was useful.
        spent["redone"] += computed
        self.on_disk = np.where(saved > 0, self.at + saved, self.on_disk)
        fails = ~ends
        still_down = fails & (lasts < self.down)
        is_node = kind < self.node
        meets = still_down & is_node & (second < 2 * self.lost_nodes / self.others)
        is_lost = ~self.copies | (kind < self.pair) | meets | (still_down & ~self.has_memory)
        now = np.where(is_lost, self.on_disk, self.at + in_memory)
        end = self.at * self.of_steps + computed
        kept = np.where(fails, now * self.of_steps, end)
        spent["useful"] = np.where(self.over, spent["useful"], kept)
        self.at = np.where(fails, now, self.at)
        self.lost_nodes = np.where(still_down, self.lost_nodes, 0) + is_node + (kind < self.pair)
        self.has_memory = ~is_lost
        self.down = np.where(is_lost, self.down_disk, self.down_memory)
        self.failures += fails
        self.from_disk += fails & is_lost
        self.over |= ends

    def outcome(self) -> Outcome:
        parts = dict(self.spent, redone=self.spent["redone"] - self.spent["useful"])
        whole = self.seconds[:, None]
        return Outcome({name: each / whole for name, each in parts.items()}, self.failures, self.from_disk)

"""Runs on ranks that fail, failure by failure, many at the same time.

From one failure to the next a run does what it would do without any: it waits until its ranks are there, goes through
steps, copies and saves, which repeat evenly, and is cut off somewhere. So where it is then follows from how long it
was, and a run takes as many rounds as it has failures, however many steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base.errors import ConfigError
from .fleet import HOUR, Fleet

Numbers = NDArray[Any]
DAY = 24 * HOUR
PARTS = ("useful", "redone", "copies", "saves", "detection", "restart", "reading")


@dataclass(frozen=True)
class Outcome:
    """What became of the time of simulated runs; each array is (fleets, runs).

    Attributes:
        parts: by name as in `PARTS`, each of the whole time; they sum to 1.
        failures: how many there were.
        from_disk: after how many of them a disk was read.
    """

    parts: dict[str, Numbers]
    failures: Numbers
    from_disk: Numbers

    @property
    def goodput(self) -> Numbers:
        """Useful time of all time, by fleet."""
        mean: Numbers = self.parts["useful"].mean(axis=1)
        return mean

    @property
    def error(self) -> Numbers:
        """Standard error of `goodput`."""
        useful = self.parts["useful"]
        found: Numbers = useful.std(axis=1, ddof=1) / np.sqrt(useful.shape[1])
        return found

    def means(self, fleet: int = 0) -> dict[str, float]:
        """The parts of one fleet, each the mean over its runs."""
        return {name: float(each[fleet].mean()) for name, each in self.parts.items()}


def simulate(fleets: Sequence[Fleet], seconds: float | Sequence[float], *, runs: int = 64, seed: int = 0) -> Outcome:
    """Let each fleet run for so long, so often; all have the same luck, so that their differences are their own.

    Args:
        seconds: of a run, or of those of each fleet.
        seed: of the failures.

    Raises:
        ConfigError: no fleet, no time or no run is given.
    """
    if not fleets or runs < 1 or not np.all(np.asarray(seconds) > 0):
        raise ConfigError(f"nothing to simulate: {len(fleets)} fleets, runs={runs}, seconds={seconds}; all above 0.")
    running = _Running(fleets, np.broadcast_to(np.asarray(seconds, float), len(fleets)), runs)
    chance = np.random.default_rng(seed)
    while not running.over.all():
        # Until the next failure, of what kind it is, and whom a second one meets.
        running.attempt(chance.standard_exponential(runs), chance.random(runs), chance.random(runs))
    return running.outcome()


@dataclass(frozen=True)
class _Rhythm:
    """Numbers of all fleets, each (fleets, 1); a round is from one copy to the next, or one save without copies."""

    of_steps: Numbers
    round_: Numbers
    copy_hold: Numbers
    send: Numbers
    rounds: Numbers
    hold: Numbers
    wait: Numbers
    write: Numbers
    period: Numbers

    @classmethod
    def of(cls, fleets: Sequence[Fleet]) -> _Rhythm:
        column = _columns(fleets)
        of_steps = column(lambda each: each.copied_every * each.step_s)
        copy_hold = column(lambda each: each.copies.hold_s if each.copies else 0.0)
        rounds = column(lambda each: each.saves.every // each.copied_every)
        hold, wait = column(lambda each: each.saves.hold_s), column(lambda each: each.wait_s)
        round_ = of_steps + copy_hold
        return cls(
            of_steps,
            round_,
            copy_hold,
            column(lambda each: each.copies.send_s if each.copies else 0.0),
            rounds,
            hold,
            wait,
            column(lambda each: each.saves.write_s),
            rounds * round_ + hold + wait,
        )


@dataclass(frozen=True)
class _Place:
    """How far an attempt has come; rounds count from its beginning.

    Attributes:
        computed, copying: seconds of steps, and of copies that held up.
        in_memory: rounds of which the copies have arrived.
        saved: rounds until the last save that is written; 0: none is.
    """

    computed: Numbers
    copying: Numbers
    in_memory: Numbers
    saved: Numbers


def _place(rhythm: _Rhythm, begun: Numbers, ran: Numbers) -> _Place:
    """Where an attempt is after `ran` seconds that began `begun` rounds behind a save."""
    until_save = rhythm.rounds - begun
    first = until_save * rhythm.round_ + rhythm.hold
    saves = np.where(ran < first, 0.0, 1 + np.floor((ran - first) / rhythm.period))
    since = ran - np.where(saves > 0, first + (saves - 1) * rhythm.period, 0.0)
    whole = np.minimum(np.floor(since / rhythm.round_), np.where(saves > 0, rhythm.rounds, until_save))
    rest = since - whole * rhythm.round_
    is_saving = whole == np.where(saves > 0, rhythm.rounds, until_save)
    stepping = np.where(is_saving, 0.0, np.minimum(rest, rhythm.of_steps))
    before = np.where(saves > 0, until_save + (saves - 1) * rhythm.rounds, 0.0)
    rounds = before + whole
    # The last copy before a save was there before the save held up, and before it waited.
    under_way = np.where(whole > 0, rest, since + rhythm.hold + np.where(saves > 1, rhythm.wait, 0.0))
    written = saves - ((saves > 0) & (since < rhythm.write))
    return _Place(
        computed=rounds * rhythm.of_steps + stepping,
        copying=rounds * rhythm.copy_hold + np.where(is_saving, 0.0, rest - stepping),
        in_memory=rounds - ((rounds > 0) & (under_way < rhythm.send)),
        saved=np.where(written > 0, until_save + (written - 1) * rhythm.rounds, 0.0),
    )


def _columns(fleets: Sequence[Fleet]) -> Callable[[Callable[[Fleet], float]], Numbers]:
    return lambda value: np.array([[value(each)] for each in fleets], float)


@dataclass
class _Running:
    """All runs, each at its own time; arrays are (fleets, runs).

    Attributes:
        at: the round from which the current attempt goes on.
        on_disk: that of the last save that is written.
        down: seconds that the current attempt waits for ranks.
        lost_nodes: nodes whose memory was lost, and is not there again.
        has_memory: whether what is in memory is enough to go on from.
    """

    fleets: Sequence[Fleet]
    seconds: Numbers
    runs: int
    spent: dict[str, Numbers] = field(init=False)

    def __post_init__(self) -> None:
        def zeros() -> Numbers:
            return np.zeros((len(self.fleets), self.runs))

        column = _columns(self.fleets)
        self.rhythm = _Rhythm.of(self.fleets)
        self.mtbf = column(lambda each: each.mtbf_s)
        self.detection, self.restart = column(lambda each: each.detection_s), column(lambda each: each.restart_s)
        self.down_disk = column(lambda each: each.down_s(from_disk=True))
        self.down_memory = column(lambda each: each.down_s(from_disk=False))
        self.node, self.pair = column(lambda each: each.node_share), column(lambda each: each.pair_share)
        self.copies = column(lambda each: each.copies is not None) > 0
        self.others = np.maximum(column(lambda each: each.nodes - 1), 1)
        self.spent = {name: zeros() for name in PARTS}
        self.left = zeros() + self.seconds[:, None]
        self.at, self.on_disk, self.down, self.lost_nodes = zeros(), zeros(), zeros(), zeros()
        self.has_memory = zeros() == 0
        self.failures, self.from_disk, self.over = zeros(), zeros(), zeros() > 0

    def attempt(self, until: Numbers, kind: Numbers, second: Numbers) -> None:
        """Until the next failure, or the end.

        Args:
            until: the failure, in mean times between failures, (runs,).
            kind, second: evenly distributed from 0 to 1, (runs,).
        """
        until = until * self.mtbf
        ends = until >= self.left
        lasts = np.minimum(until, self.left)
        self.left = np.where(ends, 0.0, self.left - lasts)
        waited = np.minimum(lasts, self.down)
        begun = self.at % self.rhythm.rounds
        ran = lasts - waited
        place = _place(self.rhythm, begun, ran)
        self._spend(waited, ran, place)
        self.on_disk = np.where(place.saved > 0, self.at + place.saved, self.on_disk)
        fails = ~ends
        still_down = fails & (lasts < self.down)
        is_node = kind < self.node
        meets = still_down & is_node & (second < 2 * self.lost_nodes / self.others)
        is_lost = ~self.copies | (kind < self.pair) | meets | (still_down & ~self.has_memory)
        now = np.where(is_lost, self.on_disk, self.at + place.in_memory)
        end = self.at * self.rhythm.of_steps + place.computed
        kept = np.where(fails, now * self.rhythm.of_steps, end)
        self.spent["useful"] = np.where(self.over, self.spent["useful"], kept)
        self.at = np.where(fails, now, self.at)
        self.lost_nodes = np.where(still_down, self.lost_nodes, 0) + is_node + (kind < self.pair)
        self.has_memory = ~is_lost
        self.down = np.where(is_lost, self.down_disk, self.down_memory)
        self.failures += fails
        self.from_disk += fails & is_lost
        self.over |= ends

    def _spend(self, waited: Numbers, ran: Numbers, place: _Place) -> None:
        spent = self.spent
        noticing = np.minimum(waited, self.detection)
        starting = np.minimum(waited - noticing, self.restart)
        spent["detection"] += noticing
        spent["restart"] += starting
        spent["reading"] += waited - noticing - starting
        spent["copies"] += place.copying
        spent["saves"] += ran - place.computed - place.copying
        # All that was computed, until it is known what of it was useful.
        spent["redone"] += place.computed

    def outcome(self) -> Outcome:
        """Of runs that are over."""
        parts = dict(self.spent, redone=self.spent["redone"] - self.spent["useful"])
        whole = self.seconds[:, None]
        return Outcome({name: each / whole for name, each in parts.items()}, self.failures, self.from_disk)

"""Signs of life: which rank hangs, told by those that do not.

[Note: signs of life] A rank that hangs cannot say so, and each of its peers knows only that it waits itself. So each
rank of a run has a thread that keeps a sign in the rendezvous store: a count, and where the main thread is. The first
rank reads all signs, the others read the first one's. Three things can be seen:
- A count stands still: the process is stopped, or its machine is cut off. After nine tenths of the run's `watchdog_s`,
  or of `timeout_s`, so before those that wait for it give up, a reader ends the run and names that rank.
- With a watchdog: all counts go on, and the run does not. After as long, who holds up the others is named; see
  [Note: who hangs] in `hang`.
- A collective gives up though all counts go on: a rank hangs that is not waiting, and the place in its code is known.

[Note: an alarm] Who finds one of the first two leaves a word in the store, which all ranks look for with each sign.
Each then writes down what it knows, and reports; from the same reports all judge alike, and say the same.

[Note: a store that is silent] Where no launcher hosts the store, the first rank does, and if that is stopped, whoever
asks waits for ever; so does whoever is cut off from the machine of the launcher that hosts it. There a rank has a
second thread, which asks nobody, and sees whether the first one still gets its answers. If the first rank hosts the
store, that is the one that hangs. Else the rank ends by itself: those on the other side name it, and cannot end it.

This module imports no torch; see `meshwright.launch.rank`, which uses it.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from .environment import Host
from .hang import Counts, Hang, Report, culprits, standing, tell_cut_off, tell_silent, tell_standing
from .progress import Progress
from .signs import DONE, Sign, main_thread, read_signs

if TYPE_CHECKING:
    from torch.distributed import Store

SILENT_SHARE = 0.9
"""A rank may be silent, or stand still, for this share of the time that is given."""
LEAST_SILENCE_S = 5.0
"""What a busy machine may cost is not taken for silence, unless a watchdog is asked for."""
SIGNS = 10
"""So many signs are given in the time that is given, or more."""
LONGEST_INTERVAL_S = 2.0
"""Between two signs of a rank; shorter where little time is given. `who_hangs` takes 2.5 of them, less than
`rank.ECHO_WAIT_S`."""
NAMING_SIGNS = 2
"""Of a rank that is silent for too long others know so many intervals later: one passes until they have seen its last
sign, and one until they look."""
REPORT_WAIT_S = 1.5
"""How long ranks that live wait for each other's reports."""
_ALARM = "alarm"


def sign_now(count: int, interval_s: float, progress: Progress, still_s: float = 0.0) -> Sign:
    """Of this process."""
    waits, place, stack = main_thread()
    steps = list(progress.steps)
    return Sign(
        count,
        f"{socket.gethostname()}, process {os.getpid()}",
        waits,
        place,
        interval_s,
        at=progress.at,
        still_s=still_s,
        stack=stack,
        own_s=statistics.median(own for own, _ in steps) if steps else 0.0,
        step_s=statistics.median(whole for _, whole in steps) if steps else 0.0,
        steps=len(steps),
    )


def write_sign(
    store: Store, rank: int, count: int, interval_s: float, progress: Progress | None = None, still_s: float = 0.0
) -> Sign:
    """Tell that this rank is alive, and where it is."""
    sign = sign_now(count, interval_s, progress or Progress(), still_s)
    store.set(str(rank), sign.written())
    return sign


class Pulse(threading.Thread):
    """Gives this rank's signs of life and watches those of others; see [Note: signs of life]. A context manager.

    After an error in the context it goes on, so that this rank is not taken for one that hangs while it reports.

    Args:
        store: of the world, with a connection of its own.
        rank, size: of the world.
        timeout_s: how long a collective may wait for peers.
        on_hang: called in this thread with what there is to say of ranks that hang.
        watchdog_s: how long a rank may be silent, or stand still, once it has done a step; None: as `timeout_s`, and
            standing still is not looked for.
        progress: of this rank's main thread.
        host: who hosts the store, if not this process or a launcher of this machine; see [Note: a store that is
            silent].
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        timeout_s: float,
        on_hang: Callable[[Hang], object],
        watchdog_s: float | None = None,
        progress: Progress | None = None,
        host: Host | None = None,
    ) -> None:
        super().__init__(name="meshwright-pulse", daemon=True)
        self._store, self._rank, self._size = store, rank, size
        self._watched = [each for each in (range(size) if rank == 0 else [0]) if each != rank]
        self.interval_s = min(LONGEST_INTERVAL_S, (watchdog_s or timeout_s) / SIGNS)
        self._starting_s = max(SILENT_SHARE * timeout_s, LEAST_SILENCE_S)
        self._limit_s = self._starting_s if watchdog_s is None else SILENT_SHARE * watchdog_s
        self._watches = watchdog_s is not None
        self._on_hang, self._progress = on_hang, progress or Progress()
        self._over, self._looks = threading.Event(), 0
        self._host = host
        self._guard = threading.Thread(target=self._mind, name="meshwright-guard", daemon=True) if host else None
        self._signs: dict[int, Sign] = {}
        self._silent_s = dict.fromkeys(self._watched, 0.0)
        self._at, self._still_s, self._settled_s = self._progress.at, 0.0, 0.0

    def __enter__(self) -> Pulse:
        self.start()
        if self._guard is not None:
            self._guard.start()
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        if error_type is None:
            self._over.set()
            self.join()

    def run(self) -> None:
        count, last_s = 0, time.monotonic()
        try:
            while True:
                elapsed_s = time.monotonic() - last_s
                last_s = time.monotonic()
                mine = self._beat(count, elapsed_s)
                silent = self.look(elapsed_s)
                if self._is_alarmed(silent, mine):
                    self._on_hang(self._settled())
                    return
                if self._over.wait(self.interval_s):
                    break
                count += 1
            write_sign(self._store, self._rank, DONE, self.interval_s)
        except RuntimeError:
            # The store has gone with the process that hosts it. Who waits for a peer still has its own limit.
            return

    def look(self, elapsed_s: float) -> list[int]:
        """Read the signs that are watched.

        Args:
            elapsed_s: since the last look. More than two intervals count as two: then this process itself was stopped.

        Returns:
            The ranks that have been silent for too long.
        """
        signs = read_signs(self._store, self._watched, self._signs)
        for rank in self._watched:
            is_new = rank in signs and (rank not in self._signs or signs[rank].count != self._signs[rank].count)
            self._silent_s[rank] = 0.0 if is_new else self._silent_s[rank] + self._counted(elapsed_s)
        self._signs = signs
        self._looks += 1
        if self._progress.at.settled:
            self._settled_s += self._counted(elapsed_s)
        is_done = {rank for rank, sign in signs.items() if sign.count == DONE}
        return [rank for rank in self._watched if self._is_silent(rank) and rank not in is_done]

    def _is_silent(self, rank: int) -> bool:
        # Who has begun its second step has been through the first one with all others. What these were silent for
        # until then does not count: a rank that held its interpreter may have yet to give its next sign.
        silent_s = self._silent_s[rank]
        return silent_s > self._starting_s or min(silent_s, self._settled_s) > self._limit_s

    def named_after_s(self) -> float:
        """For how long this rank may be silent after a sign, until others have named it."""
        return self._patience_s + NAMING_SIGNS * self.interval_s

    @property
    def _patience_s(self) -> float:
        return self._limit_s if self._progress.at.settled else self._starting_s

    def _mind(self) -> None:
        looks, last_s, silent_s = 0, time.monotonic(), 0.0
        while not self._over.wait(self.interval_s) and self.is_alive():
            elapsed_s, last_s = time.monotonic() - last_s, time.monotonic()
            silent_s = silent_s + self._counted(elapsed_s) if looks == self._looks else 0.0
            looks = self._looks
            if silent_s > self._patience_s:
                by_first = self._host == "first rank"
                hang = self._judged({0: silent_s}, self._signs, {}) if by_first else self._cut_off(silent_s)
                self._on_hang(self._witnessed(hang, tells=by_first and self._rank == 1))
                return

    def _cut_off(self, silent_s: float) -> Hang:
        mine = sign_now(0, self.interval_s, self._progress, self._still_s)
        text = tell_cut_off(self._rank, mine, f"{silent_s:.0f} s", self._option)
        return Hang((self._rank,), is_silent=False, since=time.time() - silent_s, signs=self._signs, text=text)

    def _witnessed(self, hang: Hang, *, tells: bool) -> Hang:
        """The same, written down without a word from other ranks."""
        witness = self._progress.witness
        if witness is not None:
            with suppress(OSError):
                witness.leave(sign_now(0, self.interval_s, self._progress, self._still_s))
                if tells:
                    witness.tell(hang)
        return replace(hang, is_alone=True)

    def _counted(self, elapsed_s: float) -> float:
        return min(elapsed_s, 2 * self.interval_s)

    def _beat(self, count: int, elapsed_s: float) -> Sign:
        at = self._progress.at
        self._still_s = self._still_s + self._counted(elapsed_s) if at is self._at else 0.0
        self._at = at
        return write_sign(self._store, self._rank, count, self.interval_s, self._progress, self._still_s)

    def _is_alarmed(self, silent: Sequence[int], mine: Sign) -> bool:
        """Whether there is an alarm, of this rank or another."""
        if self._rank == 0:
            signs = {0: mine, **self._signs}
            self._progress.signs = signs
            if not silent and self._watches and standing(signs, self._limit_s):
                self._store.compare_set(_ALARM, "", json.dumps({}))
        if silent:
            self._store.compare_set(_ALARM, "", json.dumps({rank: self._silent_s[rank] for rank in silent}))
        return bool(silent) or self._store.check([_ALARM])

    # -- see [Note: an alarm]

    def _settled(self) -> Hang:
        """What is to be said, after all that live have written down what they know."""
        silent = {int(rank): float(how_long) for rank, how_long in json.loads(self._store.get(_ALARM)).items()}
        witness = self._progress.witness
        mine = sign_now(0, self.interval_s, self._progress, self._still_s)
        counts: Counts = {}
        if witness is not None:
            # What is to be told is told, even where nothing can be written.
            with suppress(OSError):
                counts = witness.leave(mine)
        self._store.set(f"report/{self._rank}", json.dumps({"sign": mine.written(), "counts": counts}))
        signs = read_signs(self._store, range(self._size))
        living = [rank for rank, sign in signs.items() if rank not in silent and sign.count != DONE]
        reports = self._reports(living)
        signs |= {rank: report.sign for rank, report in reports.items()}
        hang = self._judged(silent, signs, reports)
        if witness is not None and self._rank == min(reports):
            with suppress(OSError):
                witness.tell(hang)
        return hang

    def _reports(self, living: Sequence[int]) -> dict[int, Report]:
        until = time.monotonic() + REPORT_WAIT_S
        waiting = list(living)
        while waiting and time.monotonic() < until:
            waiting = [rank for rank in waiting if not self._store.check([f"report/{rank}"])]
            time.sleep(0.02)
        reports = {}
        for rank in living:
            if rank not in waiting:
                values = json.loads(self._store.get(f"report/{rank}"))
                counts = {group: tuple(each) for group, each in values["counts"].items()}
                reports[rank] = Report(Sign.read(values["sign"]), counts)
        return reports

    @property
    def _option(self) -> str:
        return "watchdog_s" if self._watches else "timeout_s"

    def _judged(self, silent: dict[int, float], signs: dict[int, Sign], reports: dict[int, Report]) -> Hang:
        if silent:
            ranks, how_long = list(silent), max(silent.values())
            text = tell_silent(ranks, signs, f"{how_long:.0f} s", self._option)
        else:
            ranks = culprits(reports)
            how_long = signs[ranks[0]].still_s
            text = tell_standing(ranks, signs)
        witness = self._progress.witness
        where = f" The stacks of all ranks are in {witness.where}." if witness is not None else ""
        return Hang(tuple(ranks), bool(silent), time.time() - how_long, signs, text + where)

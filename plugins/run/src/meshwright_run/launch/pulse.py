"""Signs of life, by which ranks that live find the rank that hangs.

[Note: signs of life] Each rank has a thread that keeps a sign in the rendezvous store: a count, and where the main
thread is. The first rank reads all signs, the others read the first one's. Three things can be seen:
- A count stands still: the process is stopped, or its machine is cut off. After nine tenths of `watchdog_s`, or of
  `timeout_s`, so before those that wait for it time out, a reader ends the run and names that rank.
- With a watchdog: all counts increase, but the run does not advance. After the same time, the rank that holds up the
  others is named; see [Note: who hangs] in `hang`.
- A collective times out though all counts increase: a rank hangs that is not waiting, and its place is known.

[Note: an alarm] The finder of one of the first two sets a key in the store, which all ranks look for with each sign.
Each then writes down what it knows and reports; from the same reports all reach the same verdict.

[Note: a store that is silent] Whoever asks a store whose host is stopped or cut off waits for ever. A second thread
never asks the store, and checks that the first one still gets answers. If the first rank hosts the store, that rank
hangs. Otherwise this rank ends by itself: those on the other side name it, and cannot end it.
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

from meshwright.plugin import Counts, Hang, Host, Progress, Sign

from .hang import DONE, Report, culprits, main_thread, read_signs, standing, tell_cut_off, tell_silent, tell_standing

if TYPE_CHECKING:
    from torch.distributed import Store

SILENT_SHARE = 0.9
"""A rank may be silent, or stand still, for this share of the limit."""
LEAST_SILENCE_S = 5.0
"""Shorter silence is taken for a busy machine, unless a watchdog is asked for."""
SIGNS = 10
"""At least so many signs are given within the limit."""
LONGEST_INTERVAL_S = 2.0
"""Between two signs of a rank. `who_hangs` takes 2.5 of them, less than `rank.ECHO_WAIT_S`."""
NAMING_SIGNS = 2
"""Others know so many intervals later that a rank was silent: one until they see its last sign, one until they look."""
REPORT_WAIT_S = 1.5
"""How long ranks that live wait for each other's reports."""
_ALARM = "alarm"


def sign_now(count: int, interval_s: float, progress: Progress, still_s: float = 0.0) -> Sign:
    """Return a sign of this process."""
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
    """Write this rank's sign into the store."""
    sign = sign_now(count, interval_s, progress or Progress(), still_s)
    store.set(str(rank), sign.written())
    return sign


class Pulse(threading.Thread):
    """Gives this rank's signs of life and watches those of others; see [Note: signs of life]. A context manager.

    After an error it continues, so that this rank does not seem to hang while it reports. `store`: of the world, with a
    connection of its own. `timeout_s`: how long a collective may wait. `watchdog_s`: how long a rank may be silent, or
    stand still, after its first step; None: `timeout_s`, and it may stand still.
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
        self._option = "watchdog_s" if self._watches else "timeout_s"
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
                    self._on_hang(self._verdict())
                    return
                if self._over.wait(self.interval_s):
                    break
                count += 1
            write_sign(self._store, self._rank, DONE, self.interval_s)
        except RuntimeError:
            # The store has ended with the process that hosts it. Whoever waits for a peer still has its own limit.
            return

    def look(self, elapsed_s: float) -> list[int]:
        """Return the watched ranks that have been silent for too long, `elapsed_s` after the last look."""
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
        # When this rank begins its second step, all have done the first one. Earlier silence does not count against the
        # lower limit: a rank that held its interpreter's lock may not have given its next sign yet.
        silent_s = self._silent_s[rank]
        return silent_s > self._starting_s or min(silent_s, self._settled_s) > self._limit_s

    def named_after_s(self) -> float:
        """Return for how long this rank may be silent after a sign, until others have named it."""
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
                self._on_hang(self._lonely_verdict(silent_s))
                return

    def _lonely_verdict(self, silent_s: float) -> Hang:
        """The verdict without a word from other ranks; see [Note: a store that is silent]."""
        mine, by_first = self._sign_now(), self._host == "first rank"
        if by_first:
            hang = self._judged({0: silent_s}, self._signs, {})
        else:
            text = tell_cut_off(self._rank, mine, f"{silent_s:.0f} s", self._option)
            hang = Hang((self._rank,), is_silent=False, since=time.time() - silent_s, signs=self._signs, text=text)
        witness = self._progress.witness
        if witness is not None:
            with suppress(OSError):
                witness.leave(mine)
                if by_first and self._rank == 1:
                    witness.tell(hang)
        return replace(hang, is_alone=True)

    def _counted(self, elapsed_s: float) -> float:
        return min(elapsed_s, 2 * self.interval_s)

    def _sign_now(self) -> Sign:
        return sign_now(0, self.interval_s, self._progress, self._still_s)

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

    def _verdict(self) -> Hang:
        """The verdict, after all that live have written down what they know."""
        silent = {int(rank): float(how_long) for rank, how_long in json.loads(self._store.get(_ALARM)).items()}
        witness = self._progress.witness
        mine = self._sign_now()
        counts: Counts = {}
        if witness is not None:
            # The hang is reported even where nothing can be written.
            with suppress(OSError):
                counts = witness.leave(mine)
        self._store.set(f"report/{self._rank}", json.dumps({"sign": mine.written(), "counts": counts}))
        signs = read_signs(self._store, range(self._size))
        reports = self._reports([rank for rank, sign in signs.items() if rank not in silent and sign.count != DONE])
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

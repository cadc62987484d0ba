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

[Note: a store that is silent] Whoever asks a store whose host is stopped or cut off waits forever. A second thread
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

from meshwright.plugin import CollectiveCounts, Hang, HeartbeatRecord, Progress, StoreHost

from .hang_detection import (
    FINISHED,
    HangReport,
    find_culprits,
    find_stalled_ranks,
    format_disconnect,
    format_silence,
    format_stall,
    inspect_main_thread,
    read_heartbeats,
)

if TYPE_CHECKING:
    from torch.distributed import Store

SILENCE_FRACTION = 0.9
"""A rank may be silent, or stand still, for this share of the limit."""
MIN_SILENCE_S = 5.0
"""Shorter silence is taken for a busy machine, unless a watchdog is asked for."""
MIN_HEARTBEATS = 10
"""At least so many signs are given within the limit."""
MAX_INTERVAL_S = 2.0
"""Between two signs of a rank. `describe_hung_rank` takes 2.5 of them, less than `rank.PEER_FAILURE_WAIT_S`."""
DETECTION_INTERVALS = 2
"""Others know so many intervals later that a rank was silent: one until they see its last sign, one until they look."""
REPORT_WAIT_S = 1.5
"""How long ranks that live wait for each other's reports."""
_ALARM_KEY = "alarm"


def create_heartbeat_record(
    sequence_number: int, interval_s: float, progress: Progress, stalled_s: float = 0.0
) -> HeartbeatRecord:
    """Return a sign of this process."""
    waits, place, stack = inspect_main_thread()
    steps = list(progress.step_times)
    return HeartbeatRecord(
        sequence_number,
        f"{socket.gethostname()}, process {os.getpid()}",
        waits,
        place,
        interval_s,
        phase=progress.phase,
        stalled_s=stalled_s,
        stack=stack,
        busy_s=statistics.median(own for own, _ in steps) if steps else 0.0,
        step_s=statistics.median(whole for _, whole in steps) if steps else 0.0,
        num_steps=len(steps),
    )


def write_heartbeat(
    store: Store,
    rank: int,
    sequence_number: int,
    interval_s: float,
    progress: Progress | None = None,
    stalled_s: float = 0.0,
) -> HeartbeatRecord:
    """Write this rank's sign into the store."""
    sign = create_heartbeat_record(sequence_number, interval_s, progress or Progress(), stalled_s)
    store.set(str(rank), sign.to_json())
    return sign


class Heartbeat(threading.Thread):
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
        host: StoreHost | None = None,
    ) -> None:
        super().__init__(name="meshwright-pulse", daemon=True)
        self._store, self._rank, self._size = store, rank, size
        self._watched_ranks = [each for each in (range(size) if rank == 0 else [0]) if each != rank]
        self.interval_s = min(MAX_INTERVAL_S, (watchdog_s or timeout_s) / MIN_HEARTBEATS)
        self._startup_limit_s = max(SILENCE_FRACTION * timeout_s, MIN_SILENCE_S)
        self._limit_s = self._startup_limit_s if watchdog_s is None else SILENCE_FRACTION * watchdog_s
        self._has_watchdog = watchdog_s is not None
        self._option = "watchdog_s" if self._has_watchdog else "timeout_s"
        self._on_hang, self._progress = on_hang, progress or Progress()
        self._stop_event, self._num_checks = threading.Event(), 0
        self._host = host
        self._store_monitor = (
            threading.Thread(target=self._monitor_store, name="meshwright-guard", daemon=True) if host else None
        )
        self._heartbeats: dict[int, HeartbeatRecord] = {}
        self._silent_s = dict.fromkeys(self._watched_ranks, 0.0)
        self._last_phase, self._stalled_s, self._warmed_up_s = self._progress.phase, 0.0, 0.0

    def __enter__(self) -> Heartbeat:
        self.start()
        if self._store_monitor is not None:
            self._store_monitor.start()
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        if error_type is None:
            self._stop_event.set()
            self.join()

    def run(self) -> None:
        count, last_s = 0, time.monotonic()
        try:
            while True:
                elapsed_s = time.monotonic() - last_s
                last_s = time.monotonic()
                mine = self._beat(count, elapsed_s)
                silent = self.find_silent_ranks(elapsed_s)
                if self._check_alarm(silent, mine):
                    self._on_hang(self._diagnose())
                    return
                if self._stop_event.wait(self.interval_s):
                    break
                count += 1
            write_heartbeat(self._store, self._rank, FINISHED, self.interval_s)
        except RuntimeError:
            # The store has ended with the process that hosts it. Whoever waits for a peer still has its own limit.
            return

    def find_silent_ranks(self, elapsed_s: float) -> list[int]:
        """Return the watched ranks that have been silent for too long, `elapsed_s` after the last look."""
        signs = read_heartbeats(self._store, self._watched_ranks, self._heartbeats)
        for rank in self._watched_ranks:
            is_new = rank in signs and (
                rank not in self._heartbeats or signs[rank].sequence_number != self._heartbeats[rank].sequence_number
            )
            self._silent_s[rank] = 0.0 if is_new else self._silent_s[rank] + self._cap_elapsed(elapsed_s)
        self._heartbeats = signs
        self._num_checks += 1
        if self._progress.phase.is_warmed_up:
            self._warmed_up_s += self._cap_elapsed(elapsed_s)
        is_done = {rank for rank, sign in signs.items() if sign.sequence_number == FINISHED}
        return [rank for rank in self._watched_ranks if self._is_silent(rank) and rank not in is_done]

    def _is_silent(self, rank: int) -> bool:
        # When this rank begins its second step, all have done the first one. Earlier silence does not count against the
        # lower limit: a rank that held its interpreter's lock may not have given its next sign yet.
        silent_s = self._silent_s[rank]
        return silent_s > self._startup_limit_s or min(silent_s, self._warmed_up_s) > self._limit_s

    def get_silence_limit_s(self) -> float:
        """Return for how long this rank may be silent after a sign, until others have named it."""
        return self._silence_limit_s + DETECTION_INTERVALS * self.interval_s

    @property
    def _silence_limit_s(self) -> float:
        return self._limit_s if self._progress.phase.is_warmed_up else self._startup_limit_s

    def _monitor_store(self) -> None:
        looks, last_s, silent_s = 0, time.monotonic(), 0.0
        while not self._stop_event.wait(self.interval_s) and self.is_alive():
            elapsed_s, last_s = time.monotonic() - last_s, time.monotonic()
            silent_s = silent_s + self._cap_elapsed(elapsed_s) if looks == self._num_checks else 0.0
            looks = self._num_checks
            if silent_s > self._silence_limit_s:
                self._on_hang(self._diagnose_alone(silent_s))
                return

    def _diagnose_alone(self, silent_s: float) -> Hang:
        """The verdict without a word from other ranks; see [Note: a store that is silent]."""
        mine, by_first = self._create_record(), self._host == "first rank"
        if by_first:
            hang = self._build_hang({0: silent_s}, self._heartbeats, {})
        else:
            text = format_disconnect(self._rank, mine, f"{silent_s:.0f} s", self._option)
            hang = Hang(
                (self._rank,),
                is_silent=False,
                since_s=time.time() - silent_s,
                heartbeats=self._heartbeats,
                message=text,
            )
        witness = self._progress.hang_reporter
        if witness is not None:
            with suppress(OSError):
                witness.dump_stacks(mine)
                if by_first and self._rank == 1:
                    witness.report(hang)
        return replace(hang, is_store_down=True)

    def _cap_elapsed(self, elapsed_s: float) -> float:
        return min(elapsed_s, 2 * self.interval_s)

    def _create_record(self) -> HeartbeatRecord:
        return create_heartbeat_record(0, self.interval_s, self._progress, self._stalled_s)

    def _beat(self, sequence_number: int, elapsed_s: float) -> HeartbeatRecord:
        at = self._progress.phase
        self._stalled_s = self._stalled_s + self._cap_elapsed(elapsed_s) if at is self._last_phase else 0.0
        self._last_phase = at
        return write_heartbeat(
            self._store, self._rank, sequence_number, self.interval_s, self._progress, self._stalled_s
        )

    def _check_alarm(self, silent_ranks: Sequence[int], own_heartbeat: HeartbeatRecord) -> bool:
        """Whether there is an alarm, of this rank or another."""
        if self._rank == 0:
            signs = {0: own_heartbeat, **self._heartbeats}
            self._progress.heartbeats = signs
            if not silent_ranks and self._has_watchdog and find_stalled_ranks(signs, self._limit_s):
                self._store.compare_set(_ALARM_KEY, "", json.dumps({}))
        if silent_ranks:
            self._store.compare_set(_ALARM_KEY, "", json.dumps({rank: self._silent_s[rank] for rank in silent_ranks}))
        return bool(silent_ranks) or self._store.check([_ALARM_KEY])

    # -- see [Note: an alarm]

    def _diagnose(self) -> Hang:
        """The verdict, after all that live have written down what they know."""
        silent = {int(rank): float(how_long) for rank, how_long in json.loads(self._store.get(_ALARM_KEY)).items()}
        witness = self._progress.hang_reporter
        mine = self._create_record()
        counts: CollectiveCounts = {}
        if witness is not None:
            # The hang is reported even where nothing can be written.
            with suppress(OSError):
                counts = witness.dump_stacks(mine)
        self._store.set(f"report/{self._rank}", json.dumps({"heartbeat": mine.to_json(), "counts": counts}))
        signs = read_heartbeats(self._store, range(self._size))
        reports = self._collect_reports(
            [rank for rank, sign in signs.items() if rank not in silent and sign.sequence_number != FINISHED]
        )
        signs |= {rank: report.heartbeat for rank, report in reports.items()}
        hang = self._build_hang(silent, signs, reports)
        if witness is not None and self._rank == min(reports):
            with suppress(OSError):
                witness.report(hang)
        return hang

    def _collect_reports(self, ranks: Sequence[int]) -> dict[int, HangReport]:
        until = time.monotonic() + REPORT_WAIT_S
        waiting = list(ranks)
        while waiting and time.monotonic() < until:
            waiting = [rank for rank in waiting if not self._store.check([f"report/{rank}"])]
            time.sleep(0.02)
        reports = {}
        for rank in ranks:
            if rank not in waiting:
                values = json.loads(self._store.get(f"report/{rank}"))
                counts = {group: tuple(each) for group, each in values["counts"].items()}
                reports[rank] = HangReport(HeartbeatRecord.from_json(values["heartbeat"]), counts)
        return reports

    def _build_hang(
        self, silent_s: dict[int, float], heartbeats: dict[int, HeartbeatRecord], reports: dict[int, HangReport]
    ) -> Hang:
        if silent_s:
            ranks, how_long = list(silent_s), max(silent_s.values())
            text = format_silence(ranks, heartbeats, f"{how_long:.0f} s", self._option)
        else:
            ranks = find_culprits(reports)
            how_long = heartbeats[ranks[0]].stalled_s
            text = format_stall(ranks, heartbeats)
        witness = self._progress.hang_reporter
        where = f" The stacks of all ranks are in {witness.location}." if witness is not None else ""
        return Hang(tuple(ranks), bool(silent_s), time.time() - how_long, heartbeats, text + where)

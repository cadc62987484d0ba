"""Heartbeats of all ranks, from which live ranks find the rank that hangs.

[Note: heartbeats] In each rank, a thread writes heartbeats to the rendezvous store: a sequence number, and where the
main thread is. Rank 0 reads the heartbeats of all ranks, the others read those of rank 0. They detect three cases:
- A sequence number does not change: the process is stopped, or its node is unreachable. After nine tenths of
  `watchdog_s`, or of `timeout_s`, before ranks that wait for it time out, a reader ends the run and names that rank.
- With a watchdog: all sequence numbers increase, but the run makes no progress. After the same time, the rank that
  delays the others is named; see [Note: culprits] in `hang_detection`.
- A collective times out while all sequence numbers increase: the rank that does not wait hangs, at a known location.

[Note: alarms] The rank that detects one of the first two cases sets a key in the store, which all ranks check with each
heartbeat. Each rank then writes its stacks and a report to the store. All reach the same diagnosis from these reports.

[Note: unresponsive store] A request to a store whose host is stopped or unreachable never returns. A second thread,
which makes no requests, checks that the first one still gets answers. If rank 0 hosts the store, rank 0 hangs.
Otherwise this rank ends on its own: the ranks that can reach the store name it, but cannot end it.
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
"""Fraction of the limit for which a rank may send no heartbeat, or stall."""
MIN_SILENCE_S = 5.0
"""Minimum limit without a watchdog: a busy machine may cause shorter gaps between heartbeats."""
MIN_HEARTBEATS = 10
"""Minimum number of heartbeats within the limit."""
MAX_INTERVAL_S = 2.0
"""Maximum time between two heartbeats. `describe_hung_rank` takes 2.5 times as long, which must be less than
`rank_process.PEER_FAILURE_WAIT_S`."""
DETECTION_INTERVALS = 2
"""Intervals until others detect silence: one until they read the last heartbeat, one until they check again."""
REPORT_WAIT_S = 1.5
"""Time that live ranks wait for each other's reports."""
_ALARM_KEY = "alarm"


def create_heartbeat_record(
    sequence_number: int, interval_s: float, progress: Progress, stalled_s: float = 0.0
) -> HeartbeatRecord:
    """Return a heartbeat of this process."""
    waits, location, stack = inspect_main_thread()
    steps = list(progress.step_times)
    return HeartbeatRecord(
        sequence_number,
        f"{socket.gethostname()}, process {os.getpid()}",
        waits,
        location,
        interval_s,
        phase=progress.phase,
        stalled_s=stalled_s,
        stack=stack,
        busy_s=statistics.median(busy for busy, _ in steps) if steps else 0.0,
        step_s=statistics.median(full for _, full in steps) if steps else 0.0,
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
    """Write a heartbeat of this rank to the store, and return it."""
    record = create_heartbeat_record(sequence_number, interval_s, progress or Progress(), stalled_s)
    store.set(str(rank), record.to_json())
    return record


class Heartbeat(threading.Thread):
    """Thread that sends this rank's heartbeats and reads those of others; see [Note: heartbeats]. A context manager.

    After an error it continues, so that this rank does not seem to hang while it reports. `store`: the world's store,
    with a separate connection. `timeout_s`: how long a collective may wait. `watchdog_s`: how long a rank may send no
    heartbeat, or stall, after its first step; None: no heartbeat for `timeout_s`, and it may stall.
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
            # The store has ended with the process that hosts it. Collectives still have their own timeout.
            return

    def find_silent_ranks(self, elapsed_s: float) -> list[int]:
        """Return the watched ranks without a heartbeat for too long, `elapsed_s` after the last check."""
        records = read_heartbeats(self._store, self._watched_ranks, self._heartbeats)
        for rank in self._watched_ranks:
            is_new = rank in records and (
                rank not in self._heartbeats or records[rank].sequence_number != self._heartbeats[rank].sequence_number
            )
            self._silent_s[rank] = 0.0 if is_new else self._silent_s[rank] + self._cap_elapsed(elapsed_s)
        self._heartbeats = records
        self._num_checks += 1
        if self._progress.phase.is_warmed_up:
            self._warmed_up_s += self._cap_elapsed(elapsed_s)
        is_done = {rank for rank, record in records.items() if record.sequence_number == FINISHED}
        return [rank for rank in self._watched_ranks if self._is_silent(rank) and rank not in is_done]

    def _is_silent(self, rank: int) -> bool:
        # When this rank starts its second step, all have finished the first one. Earlier silence does not count against
        # the lower limit: a rank that held the GIL may not have sent its next heartbeat yet.
        silent_s = self._silent_s[rank]
        return silent_s > self._startup_limit_s or min(silent_s, self._warmed_up_s) > self._limit_s

    def get_silence_limit_s(self) -> float:
        """Return the time after a heartbeat [s] after which others have detected that this rank is silent."""
        return self._silence_limit_s + DETECTION_INTERVALS * self.interval_s

    @property
    def _silence_limit_s(self) -> float:
        return self._limit_s if self._progress.phase.is_warmed_up else self._startup_limit_s

    def _monitor_store(self) -> None:
        num_checks, last_s, silent_s = 0, time.monotonic(), 0.0
        while not self._stop_event.wait(self.interval_s) and self.is_alive():
            elapsed_s, last_s = time.monotonic() - last_s, time.monotonic()
            silent_s = silent_s + self._cap_elapsed(elapsed_s) if num_checks == self._num_checks else 0.0
            num_checks = self._num_checks
            if silent_s > self._silence_limit_s:
                self._on_hang(self._diagnose_alone(silent_s))
                return

    def _diagnose_alone(self, silent_s: float) -> Hang:
        """Return the diagnosis without reports of other ranks; see [Note: unresponsive store]."""
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
        reporter = self._progress.hang_reporter
        if reporter is not None:
            with suppress(OSError):
                reporter.dump_stacks(mine)
                if by_first and self._rank == 1:
                    reporter.report(hang)
        return replace(hang, is_store_down=True)

    def _cap_elapsed(self, elapsed_s: float) -> float:
        return min(elapsed_s, 2 * self.interval_s)

    def _create_record(self) -> HeartbeatRecord:
        return create_heartbeat_record(0, self.interval_s, self._progress, self._stalled_s)

    def _beat(self, sequence_number: int, elapsed_s: float) -> HeartbeatRecord:
        phase = self._progress.phase
        self._stalled_s = self._stalled_s + self._cap_elapsed(elapsed_s) if phase is self._last_phase else 0.0
        self._last_phase = phase
        return write_heartbeat(
            self._store, self._rank, sequence_number, self.interval_s, self._progress, self._stalled_s
        )

    def _check_alarm(self, silent_ranks: Sequence[int], own_heartbeat: HeartbeatRecord) -> bool:
        """Set an alarm if this rank has detected a hang; return whether there is an alarm of any rank."""
        if self._rank == 0:
            records = {0: own_heartbeat, **self._heartbeats}
            self._progress.heartbeats = records
            if not silent_ranks and self._has_watchdog and find_stalled_ranks(records, self._limit_s):
                self._store.compare_set(_ALARM_KEY, "", json.dumps({}))
        if silent_ranks:
            self._store.compare_set(_ALARM_KEY, "", json.dumps({rank: self._silent_s[rank] for rank in silent_ranks}))
        return bool(silent_ranks) or self._store.check([_ALARM_KEY])

    # -- see [Note: alarms]

    def _diagnose(self) -> Hang:
        """Return the diagnosis, after waiting for the reports of all live ranks."""
        silent = {int(rank): float(how_long) for rank, how_long in json.loads(self._store.get(_ALARM_KEY)).items()}
        reporter = self._progress.hang_reporter
        mine = self._create_record()
        counts: CollectiveCounts = {}
        if reporter is not None:
            # The hang is reported even if stacks cannot be written.
            with suppress(OSError):
                counts = reporter.dump_stacks(mine)
        self._store.set(f"report/{self._rank}", json.dumps({"heartbeat": mine.to_json(), "counts": counts}))
        records = read_heartbeats(self._store, range(self._size))
        reports = self._collect_reports(
            [rank for rank, record in records.items() if rank not in silent and record.sequence_number != FINISHED]
        )
        records |= {rank: report.heartbeat for rank, report in reports.items()}
        hang = self._build_hang(silent, records, reports)
        if reporter is not None and self._rank == min(reports):
            with suppress(OSError):
                reporter.report(hang)
        return hang

    def _collect_reports(self, ranks: Sequence[int]) -> dict[int, HangReport]:
        deadline = time.monotonic() + REPORT_WAIT_S
        waiting = list(ranks)
        while waiting and time.monotonic() < deadline:
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
        reporter = self._progress.hang_reporter
        where = f" The stacks of all ranks are in {reporter.location}." if reporter is not None else ""
        return Hang(tuple(ranks), bool(silent_s), time.time() - how_long, heartbeats, text + where)

"""Find the rank that hangs from the heartbeats of all ranks.

[Note: culprits] The ranks at the earliest position (see [Note: positions] in `meshwright.mesh.progress`) delay the
others. If all of them have stalled for too long, there is a hang. Its culprits are those that do not wait for others.
Of several, they are those that have started fewer collectives of a group than other ranks of the group, by torch's
flight recorder (with NCCL the host waits for the device, not in torch.distributed). Of several again, they are those
that have finished fewer micro-batches.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING

from meshwright.plugin import CollectiveCounts, HeartbeatRecord

if TYPE_CHECKING:
    from torch.distributed import Store

FINISHED = -1
"""Sequence number of a rank whose main function has returned."""
MAX_FRAMES = 40
"""Maximum frames of the main thread's stack in a heartbeat."""
_WAIT_FUNCTIONS = frozenset({"wait", "_send_receive"})
"""Names of functions of this project in which a rank waits for others."""


@dataclass(frozen=True)
class HangReport:
    """Report of one rank about a hang."""

    heartbeat: HeartbeatRecord
    counts: CollectiveCounts = field(default_factory=dict)


def read_heartbeats(
    store: Store, ranks: Sequence[int], known_ranks: Collection[int] = ()
) -> dict[int, HeartbeatRecord]:
    """Return the last heartbeat of each rank that has sent one; `known_ranks` are known to have sent one."""
    keys = {rank: str(rank) for rank in ranks if rank in known_ranks or store.check([str(rank)])}
    values = store.multi_get(list(keys.values())) if keys else []
    return {rank: HeartbeatRecord.from_json(value) for rank, value in zip(keys, values, strict=True)}


def inspect_main_thread() -> tuple[bool, str, tuple[str, ...]]:
    """Return whether the main thread waits for other ranks, its location outside of torch, and its stack."""
    ident = threading.main_thread().ident
    innermost = sys._current_frames().get(ident) if ident is not None else None
    frames = [] if innermost is None else [frame for frame, _ in traceback.walk_stack(innermost)]
    waits, location = False, "(not known)"
    for frame in frames:
        parts = frame.f_code.co_filename.split(os.sep)
        is_torch = "torch" in parts
        waits = waits or (is_torch and "distributed" in parts[parts.index("torch") :])
        is_waiting = frame.f_code.co_name in _WAIT_FUNCTIONS and any(
            part.startswith("meshwright") for part in parts[:-1]
        )
        waits = waits or is_waiting
        if not is_torch and frame.f_code.co_filename != threading.__file__:
            location = _format_frame(frame)
            break
    return waits, location, tuple(map(_format_frame, frames[:MAX_FRAMES]))


def _format_frame(frame: FrameType) -> str:
    where = "/".join(frame.f_code.co_filename.split(os.sep)[-3:])
    return f"{where}:{frame.f_lineno} in {frame.f_code.co_name}"


def find_stalled_ranks(heartbeats: Mapping[int, HeartbeatRecord], limit_s: float) -> list[int]:
    """Return the ranks at the earliest position, if all stall for longer than `limit_s`; see [Note: culprits]."""
    last = _find_rearmost(heartbeats)
    too_long = all(
        record.stalled_s > limit_s and record.phase.is_warmed_up and not record.phase.may_stall
        for record in last.values()
    )
    return list(last) if last and too_long else []


def find_culprits(reports: Mapping[int, HangReport]) -> list[int]:
    """Return the ranks that cause the hang; see [Note: culprits]."""
    ranks = list(_find_rearmost({rank: report.heartbeat for rank, report in reports.items()}))
    ranks = [rank for rank in ranks if not reports[rank].heartbeat.is_communicating] or ranks
    ranks = [rank for rank in ranks if _is_behind(rank, reports)] or ranks
    fewest = min((reports[rank].heartbeat.phase.num_ticks for rank in ranks), default=0)
    return [rank for rank in ranks if reports[rank].heartbeat.phase.num_ticks == fewest]


def _find_rearmost(heartbeats: Mapping[int, HeartbeatRecord]) -> dict[int, HeartbeatRecord]:
    running = {rank: record for rank, record in heartbeats.items() if record.sequence_number != FINISHED}
    earliest = min(((record.phase.step, record.phase.phase_index) for record in running.values()), default=None)
    return {
        rank: record for rank, record in running.items() if (record.phase.step, record.phase.phase_index) == earliest
    }


def _is_behind(rank: int, reports: Mapping[int, HangReport]) -> bool:
    mine = reports[rank].counts
    others = (report.counts for other, report in reports.items() if other != rank)
    return any(group in mine and mine[group] < counts for each in others for group, counts in each.items())


def format_stall(ranks: Sequence[int], heartbeats: Mapping[int, HeartbeatRecord]) -> str:
    """Return the message about ranks that send heartbeats but make no progress."""
    which = f"rank {ranks[0]}" if len(ranks) == 1 else f"one of the ranks {', '.join(map(str, ranks))}"
    record = heartbeats[ranks[0]]
    return (
        f"{which} hangs: no progress for {record.stalled_s:.1f} s in step {record.phase.step}, phase "
        f"{record.phase.name}: {_format_locations(ranks, heartbeats)}. If a phase may take that long, raise watchdog_s."
    )


def format_silence(
    ranks: Sequence[int], heartbeats: Mapping[int, HeartbeatRecord], duration: str, option: str = "timeout_s"
) -> str:
    """Return the message about ranks that send no heartbeat; `option`: the key of the run file that sets the limit."""
    rank, others = ranks[0], ", ".join(map(str, ranks[1:]))
    record = heartbeats.get(rank)
    who, where = f"rank {rank}", ""
    if record is not None:
        step = f", in step {record.phase.step}, phase {record.phase.name}" if record.phase.step else ""
        who, where = f"{who} ({record.process})", f" It was last at {record.location}{step}."
    more = f" The ranks {others} send none either." if others else ""
    return (
        f"{who} hangs: no heartbeat for {duration}.{where}{more} Its process is stopped or starved, or its node is "
        f"unreachable. If such pauses are normal, raise {option}."
    )


def format_disconnect(rank: int, heartbeat: HeartbeatRecord, duration: str, option: str) -> str:
    """Return the message of a rank whose launcher's store does not answer; arguments as in `format_silence`."""
    return (
        f"rank {rank} ({heartbeat.process}) gets no answer from the rendezvous store for {duration}: its node cannot "
        "reach the launcher that hosts the store, or that launcher is stopped. The rank ends, since others will "
        f"continue without it. If such pauses are normal, raise {option}."
    )


def _format_locations(ranks: Sequence[int], heartbeats: Mapping[int, HeartbeatRecord]) -> str:
    return "; ".join(f"rank {rank} ({heartbeats[rank].process}) is at {heartbeats[rank].location}" for rank in ranks)


def describe_hung_rank(
    store: Store, own_rank: int, size: int, find_timed_out: Callable[[], Collection[int]]
) -> str | None:
    """Return a message that names the rank that hangs, after a collective of this rank `own_rank` has timed out.

    `find_timed_out` returns the other ranks whose collectives have timed out. None if no rank stands out.
    """
    others = [rank for rank in range(size) if rank != own_rank]
    before = read_heartbeats(store, others)
    if not before:
        return None
    time.sleep(2.5 * max(record.interval_s for record in before.values()))
    after = read_heartbeats(store, others, before)
    silent = [
        rank
        for rank, record in after.items()
        if rank in before and record.sequence_number == before[rank].sequence_number != FINISHED
    ]
    if silent:
        return format_silence(silent, after, f"{2.5 * after[silent[0]].interval_s:.0f} s or more")
    waiting = set(find_timed_out())
    busy = [
        rank
        for rank in after
        if rank not in waiting and not after[rank].is_communicating and after[rank].sequence_number != FINISHED
    ]
    if not busy:
        return None
    return (
        f"{'rank' if len(busy) == 1 else 'ranks'} {', '.join(map(str, busy))} did not reach the point where rank "
        f"{own_rank} waits: {_format_locations(busy, after)}. If that may take this long, raise timeout_s."
    )

"""Find the rank that hangs from the signs of life of all ranks.

[Note: who hangs] The ranks at the earliest position (see [Note: positions] in `mesh.progress`) hold up the others. If
they all have stood still for too long, there is a hang. The culprits are those of them that do not wait for others; if
several are left, those that have started fewer collectives of a group than other ranks of it, by torch's flight
recorder (with NCCL the host waits for the device, and not in torch.distributed); then those with fewer microbatches
done.
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
"""The count of a rank whose main function has returned."""
MAX_FRAMES = 40
"""Frames of the main thread's stack in a sign."""
_WAIT_FUNCTIONS = frozenset({"wait", "_send_receive"})
"""Functions of this project in which a rank waits for others."""


@dataclass(frozen=True)
class HangReport:
    """What a rank reports once there is a hang."""

    heartbeat: HeartbeatRecord
    counts: CollectiveCounts = field(default_factory=dict)


def read_heartbeats(
    store: Store, ranks: Sequence[int], known_ranks: Collection[int] = ()
) -> dict[int, HeartbeatRecord]:
    """Return the last sign of each rank that has given one; of the `known_ranks` ranks this is not asked first."""
    keys = {rank: str(rank) for rank in ranks if rank in known_ranks or store.check([str(rank)])}
    values = store.multi_get(list(keys.values())) if keys else []
    return {rank: HeartbeatRecord.from_json(value) for rank, value in zip(keys, values, strict=True)}


def inspect_main_thread() -> tuple[bool, str, tuple[str, ...]]:
    """Return whether the main thread waits for other ranks, where it is outside of torch, and its stack."""
    ident = threading.main_thread().ident
    innermost = sys._current_frames().get(ident) if ident is not None else None
    frames = [] if innermost is None else [frame for frame, _ in traceback.walk_stack(innermost)]
    waits, place = False, "(not known)"
    for frame in frames:
        parts = frame.f_code.co_filename.split(os.sep)
        is_torch = "torch" in parts
        waits = waits or (is_torch and "distributed" in parts[parts.index("torch") :])
        is_waiting = frame.f_code.co_name in _WAIT_FUNCTIONS and any(
            part.startswith("meshwright") for part in parts[:-1]
        )
        waits = waits or is_waiting
        if not is_torch and frame.f_code.co_filename != threading.__file__:
            place = _format_frame(frame)
            break
    return waits, place, tuple(map(_format_frame, frames[:MAX_FRAMES]))


def _format_frame(frame: FrameType) -> str:
    where = "/".join(frame.f_code.co_filename.split(os.sep)[-3:])
    return f"{where}:{frame.f_lineno} in {frame.f_code.co_name}"


def find_stalled_ranks(heartbeats: Mapping[int, HeartbeatRecord], limit_s: float) -> list[int]:
    """Return the ranks at the earliest position, if they all have stood still for longer; see [Note: who hangs]."""
    last = _find_rearmost(heartbeats)
    too_long = all(
        sign.stalled_s > limit_s and sign.phase.is_warmed_up and not sign.phase.may_stall for sign in last.values()
    )
    return list(last) if last and too_long else []


def find_culprits(reports: Mapping[int, HangReport]) -> list[int]:
    """Return the ranks to name; see [Note: who hangs]."""
    found = list(_find_rearmost({rank: report.heartbeat for rank, report in reports.items()}))
    found = [rank for rank in found if not reports[rank].heartbeat.is_communicating] or found
    found = [rank for rank in found if _is_behind(rank, reports)] or found
    fewest = min((reports[rank].heartbeat.phase.num_ticks for rank in found), default=0)
    return [rank for rank in found if reports[rank].heartbeat.phase.num_ticks == fewest]


def _find_rearmost(heartbeats: Mapping[int, HeartbeatRecord]) -> dict[int, HeartbeatRecord]:
    going = {rank: sign for rank, sign in heartbeats.items() if sign.sequence_number != FINISHED}
    earliest = min(((sign.phase.step, sign.phase.phase_index) for sign in going.values()), default=None)
    return {rank: sign for rank, sign in going.items() if (sign.phase.step, sign.phase.phase_index) == earliest}


def _is_behind(rank: int, reports: Mapping[int, HangReport]) -> bool:
    mine = reports[rank].counts
    others = (report.counts for other, report in reports.items() if other != rank)
    return any(group in mine and mine[group] < counts for each in others for group, counts in each.items())


def format_stall(ranks: Sequence[int], heartbeats: Mapping[int, HeartbeatRecord]) -> str:
    """Return the message about ranks that live and do not move."""
    which = f"rank {ranks[0]}" if len(ranks) == 1 else f"one of the ranks {', '.join(map(str, ranks))}"
    sign = heartbeats[ranks[0]]
    return (
        f"{which} hangs: no progress for {sign.stalled_s:.1f} s in step {sign.phase.step}, phase {sign.phase.name}: "
        f"{_format_locations(ranks, heartbeats)}. If a phase may take so long, raise watchdog_s."
    )


def format_silence(
    ranks: Sequence[int], heartbeats: Mapping[int, HeartbeatRecord], duration: str, option: str = "timeout_s"
) -> str:
    """Return the message about ranks that give no sign of life; `option` of the run file sets how long they may."""
    rank, others = ranks[0], ", ".join(map(str, ranks[1:]))
    sign = heartbeats.get(rank)
    who, where = f"rank {rank}", ""
    if sign is not None:
        step = f", in step {sign.phase.step}, phase {sign.phase.name}" if sign.phase.step else ""
        who, where = f"{who} ({sign.process})", f" It was last at {sign.location}{step}."
    more = f" So do the ranks {others}." if others else ""
    return (
        f"{who} hangs: no sign of life for {duration}.{where}{more} Its process is stopped or starved, or its machine "
        f"is cut off. If such pauses are to be tolerated, raise {option}."
    )


def format_disconnect(rank: int, heartbeat: HeartbeatRecord, duration: str, option: str) -> str:
    """Return the message of a rank that gets no answer from a launcher's store; arguments as of `format_silence`."""
    return (
        f"rank {rank} ({heartbeat.process}) gets no answer from the rendezvous store for {duration}: its machine is "
        "cut off from that of the launcher that hosts it, or that one is stopped. It ends, since others will continue "
        f"without it. If such pauses are to be tolerated, raise {option}."
    )


def _format_locations(ranks: Sequence[int], heartbeats: Mapping[int, HeartbeatRecord]) -> str:
    return "; ".join(f"rank {rank} ({heartbeats[rank].process}) is at {heartbeats[rank].location}" for rank in ranks)


def describe_hung_rank(
    store: Store, own_rank: int, size: int, find_timed_out: Callable[[], Collection[int]]
) -> str | None:
    """Name the rank that others wait for without effect, after a collective of this rank `own_rank` has timed out.

    `find_timed_out` returns the ranks whose collectives have timed out, too.
    """
    others = [rank for rank in range(size) if rank != own_rank]
    before = read_heartbeats(store, others)
    if not before:
        return None
    time.sleep(2.5 * max(sign.interval_s for sign in before.values()))
    after = read_heartbeats(store, others, before)
    silent = [
        rank
        for rank, sign in after.items()
        if rank in before and sign.sequence_number == before[rank].sequence_number != FINISHED
    ]
    if silent:
        return format_silence(silent, after, f"{2.5 * after[silent[0]].interval_s:.0f} s and more")
    waiting = set(find_timed_out())
    busy = [
        rank
        for rank in after
        if rank not in waiting and not after[rank].is_communicating and after[rank].sequence_number != FINISHED
    ]
    if not busy:
        return None
    return (
        f"{'rank' if len(busy) == 1 else 'ranks'} {', '.join(map(str, busy))} did not come to where rank {own_rank} "
        f"waits: {_format_locations(busy, after)}. If that may take so long, raise timeout_s."
    )

"""What a rank does in a stretch of time: it computes, waits for messages alone, or does neither.

[Note: exposed communication] A message is under way while a kernel of NCCL runs; on a CPU while a thread of gloo is at
a collective, or the main thread waits for other ranks. Exposed is the part of that time in which nothing is computed:
in which no other kernel (or copy) runs on the device, or on a CPU no operator on the main thread. Operators that issue
messages or wait for them compute nothing. Time in which nothing is under way and nothing is computed is the host's: it
prepares what comes next. So computing, exposed and host add up to the total.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from .trace import ON_DEVICE, OPERATOR, Span

Intervals: TypeAlias = "list[tuple[float, float]]"
"""Sorted (start, end) that do not meet; any unit."""


def union(stretches: Iterable[tuple[float, float]]) -> Intervals:
    """Return what any of these covers; those that end where they start, or before, cover nothing."""
    found: Intervals = []
    for start, end in sorted(stretches):
        if end <= start:
            continue
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def length(intervals: Sequence[tuple[float, float]]) -> float:
    return sum(end - start for start, end in intervals)


def common(intervals: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]) -> Intervals:
    found: Intervals = []
    one = two = 0
    while one < len(intervals) and two < len(others):
        start, end = max(intervals[one][0], others[two][0]), min(intervals[one][1], others[two][1])
        if start < end:
            found.append((start, end))
        if intervals[one][1] < others[two][1]:
            one += 1
        else:
            two += 1
    return found


def without(intervals: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]) -> Intervals:
    found: Intervals = []
    index = 0
    for start, end in intervals:
        while index < len(others) and others[index][1] <= start:
            index += 1
        at, next_one = start, index
        while next_one < len(others) and others[next_one][0] < end:
            if others[next_one][0] > at:
                found.append((at, others[next_one][0]))
            at = max(at, others[next_one][1])
            next_one += 1
        if at < end:
            found.append((at, end))
    return found


@dataclass(frozen=True)
class Activity:
    """When a rank computes, and when messages are under way; of an accelerator, or else of the main thread."""

    computing: Intervals
    communicating: Intervals
    is_on_device: bool

    @property
    def exposed(self) -> Intervals:
        return without(self.communicating, self.computing)


def activity(spans: Sequence[Span]) -> Activity:
    messages = _covered(each for each in spans if each.is_communication)
    on_device = [each for each in spans if each.kind in ON_DEVICE]
    if on_device:
        return Activity(_covered(each for each in on_device if not each.is_communication), messages, True)
    main = _main_thread(spans)
    of_main = [each for each in spans if each.thread == main]
    computing = _covered(each for each in of_main if each.computes)
    # An operator on sharded tensors waits within for what it has sent.
    return Activity(without(computing, _covered(each for each in of_main if each.sends)), messages, False)


def exposed_communication(spans: Sequence[Span]) -> float:
    """Return the seconds in which a rank waits for messages and computes nothing; see [Note: exposed communication]."""
    return length(activity(spans).exposed)


def _main_thread(spans: Iterable[Span]) -> int | str | None:
    """Return the thread of the steps; where none is marked, the one with the most operators."""
    operators: Counter[int | str] = Counter()
    for each in spans:
        if each.step is not None:
            return each.thread
        if each.kind == OPERATOR:
            operators[each.thread] += 1
    return operators.most_common(1)[0][0] if operators else None


def _covered(spans: Iterable[Span]) -> Intervals:
    return union((each.start, each.end) for each in spans)

"""Stretches of time as sorted lists of (start, end) that do not meet; any unit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

Intervals: TypeAlias = "list[tuple[float, float]]"


def union(stretches: Iterable[tuple[float, float]]) -> Intervals:
    """What any of these covers; those that end where they start, or before, cover nothing."""
    found: Intervals = []
    for start, end in sorted(stretches):
        if end <= start:
            continue
        if found and start <= found[-1][1]:
            if end > found[-1][1]:
                found[-1] = (found[-1][0], end)
        else:
            found.append((start, end))
    return found


def length(intervals: Sequence[tuple[float, float]]) -> float:
    return sum(end - start for start, end in intervals)


def common(intervals: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]) -> Intervals:
    """What both cover."""
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
    """What the first cover and the others do not."""
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

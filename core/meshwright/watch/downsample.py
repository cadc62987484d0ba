"""Fewer points that look like all of them: of each bucket of steps the lowest and the highest value, so spikes stay.

A bucket is 2**k steps wide and begins at a multiple of that, so the points that were drawn stay where they are when a
run goes on. What is not finite is a gap.
"""

from __future__ import annotations

import numpy as np

MOST_POINTS = 4000
"""Of a line."""


def width(low: int, high: int, buckets: int) -> int:
    """Of a bucket, in steps: the smallest power of two by which low..high has no more than so many."""
    wide = 1
    while high // wide - low // wide + 1 > buckets:
        wide *= 2
    return wide


def within(steps: np.ndarray, low: int | None, high: int | None) -> slice:
    """The part of ascending steps from `low` to `high`, with one step more on either side, to which lines go."""
    start = 0 if low is None else int(np.searchsorted(steps, low, "left"))
    stop = len(steps) if high is None else int(np.searchsorted(steps, high, "right"))
    return slice(max(0, start - 1), min(len(steps), stop + 1))


def chosen(steps: np.ndarray, values: np.ndarray, points: int) -> np.ndarray:
    """Which points to draw.

    Args:
        steps: int64 (N), ascending.
        values: float64 (N).
        points: about the most; all where there are no more.

    Returns:
        Indices, int64, ascending: of each bucket the lowest and the highest value, and of one that holds what is not
        finite, that; the first and the last point.
    """
    if len(steps) <= max(points, 2):
        return np.arange(len(steps))
    wide = width(int(steps[0]), int(steps[-1]), max(1, points // 2))
    buckets = steps // wide
    starts = np.flatnonzero(np.diff(buckets, prepend=buckets[0] - 1))
    number = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(steps)))
    is_finite = np.isfinite(values)
    lowest = np.minimum.reduceat(np.where(is_finite, values, np.inf), starts)
    highest = np.maximum.reduceat(np.where(is_finite, values, -np.inf), starts)
    found = [np.array([0, len(steps) - 1])]
    for wanted in (is_finite & (values == lowest[number]), is_finite & (values == highest[number]), ~is_finite):
        # The first of each bucket.
        places = np.flatnonzero(wanted)
        found.append(places[np.flatnonzero(np.diff(number[places], prepend=-1))])
    return np.unique(np.concatenate(found))


def plain(values: np.ndarray) -> list[float | None]:
    """For JSON, which has no numbers that are not finite."""
    return [value if ok else None for value, ok in zip(values.tolist(), np.isfinite(values).tolist(), strict=True)]

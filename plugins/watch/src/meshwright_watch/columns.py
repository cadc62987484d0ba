"""Numbers by step, in columns that grow, and fewer points of them that look like all.

Where a file goes back to an earlier step, later lines replace earlier ones, as in `train.report.read_metrics`: a run
that was killed resumes from its last checkpoint.

[Note: buckets] Of each bucket of steps the lowest and the highest value are drawn, so spikes stay. A bucket is 2**k
steps wide and begins at a multiple of that, so the points that were drawn stay where they are while a run continues.
What is not finite is a gap.
"""

from __future__ import annotations

import bisect
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .tail import number

MAX_COLUMNS = 2000
"""Further names are left out: a page with norms of thousands of blocks would show nothing."""
MOST_POINTS = 4000
"""Of a line."""
STEP = "step"


class Columns:
    """Columns of float64, each with the steps in which it has a value.

    Attributes:
        version: grows with each change.
        last_step: the latest; 0 if there is none.
        left_out: whether there were more names than `MAX_COLUMNS`.
    """

    def __init__(self) -> None:
        self._columns: dict[str, tuple[array[int], array[float]]] = {}
        self.version = 0
        self.last_step = 0
        self.left_out = False

    @property
    def names(self) -> list[str]:
        """In the order in which they came; those of a group are "group/name"."""
        return [name for name, (steps, _) in self._columns.items() if steps]

    def clear(self) -> None:
        self._columns.clear()
        self.version += 1
        self.last_step = 0

    def add(self, records: Sequence[Mapping[str, Any]]) -> int:
        """Add lines of a file of metrics, and return how many have no step of 1 or more."""
        # Beyond that, a step is no number of 8 bytes, nor one that a page could tell from the next.
        found = [record for record in records if type(step := record.get(STEP)) is int and 1 <= step < 1 << 53]
        begin = 0
        for place, record in enumerate(found):
            before = found[place - 1][STEP] if place > begin else self.last_step
            if record[STEP] <= before:
                self._extend(found[begin:place])
                self._go_back(record[STEP])
                begin = place
        self._extend(found[begin:])
        self.version += len(found)
        return len(records) - len(found)

    def _extend(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Add records of ascending steps, column by column: most lines have the same keys."""
        if records:
            steps = array("q", [record[STEP] for record in records])
            self._put("", steps, records)
            self.last_step = steps[-1]

    def _put(self, prefix: str, steps: array[int], records: Sequence[Mapping[str, Any]]) -> None:
        signatures = dict.fromkeys(map(tuple, records))
        for name in dict.fromkeys(name for names in signatures for name in names):
            if not prefix and name == STEP:
                continue
            at, values = steps, [record[name] for record in records if name in record]
            if len(signatures) > 1:
                at = array("q", [step for step, record in zip(steps, records, strict=True) if name in record])
            types = set(map(type, values))
            if dict in types:
                groups = [place for place, value in enumerate(values) if type(value) is dict]
                of_groups = array("q", [at[place] for place in groups])
                self._put(f"{prefix}{name}/", of_groups, [values[place] for place in groups])
            if not types <= {float, int}:
                numbers = [number(value) for value in values]
                at = array("q", [step for step, value in zip(at, numbers, strict=True) if value is not None])
                values = [value for value in numbers if value is not None]
            if values:
                self._column(f"{prefix}{name}", at, values)

    def _column(self, name: str, steps: array[int], values: Sequence[float]) -> None:
        if name not in self._columns:
            if len(self._columns) >= MAX_COLUMNS:
                self.left_out = True
                return
            self._columns[name] = (array("q"), array("d"))
        column = self._columns[name]
        column[0].extend(steps)
        try:
            column[1].extend(array("d", values))
        except OverflowError:
            # An int that is larger than any float.
            column[1].extend(found for value in values if (found := number(value)) is not None)

    def _go_back(self, step: int) -> None:
        """Forget this step and later ones."""
        for steps, values in self._columns.values():
            place = bisect.bisect_left(steps, step)
            del steps[place:], values[place:]

    def column(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return copies of steps, int64 (N), and values, float64 (N); both empty where there is none of that name."""
        steps, values = self._columns.get(name, (array("q"), array("d")))
        return np.array(steps, dtype=np.int64), np.array(values, dtype=np.float64)

    def last(self, name: str) -> float | None:
        """Return the latest value."""
        _, values = self._columns.get(name, ((), ()))
        return values[-1] if values else None

    def series(self, names: list[str], low: int | None, high: int | None, points: int) -> dict[str, Any]:
        """Return points of columns within some steps, each column downsampled by itself, as values of JSON."""
        found = {}
        for name in names:
            steps, values = self.column(name)
            part = within(steps, low, high)
            steps, values = steps[part], values[part]
            places = chosen(steps, values, min(points, MOST_POINTS))
            found[name] = {"x": steps[places].tolist(), "y": plain(values[places]), "count": len(steps)}
        return found

    def together(self, by: str, names: list[str], low: int | None, high: int | None, points: int) -> dict[str, Any]:
        """Return points of several columns at the same steps, which the column `by` chooses, as values of JSON.

        Values that are drawn on top of each other must be of one step, or their sum would be of none.
        """
        steps, values = self.column(by)
        part = within(steps, low, high)
        steps, values = steps[part], values[part]
        at = steps[chosen(steps, values, min(points, MOST_POINTS))]
        found: dict[str, list[float | None]] = {}
        for name in names:
            of, numbers = self.column(name)
            if not len(of):
                found[name] = [None] * len(at)
                continue
            places = np.minimum(np.searchsorted(of, at), len(of) - 1)
            found[name] = plain(np.where(of[places] == at, numbers[places], np.nan))
        return {"x": at.tolist(), "columns": found, "count": len(steps)}


def width(low: int, high: int, buckets: int) -> int:
    """Return the steps of a bucket: the smallest power of two by which low..high has at most so many buckets."""
    wide = 1
    while high // wide - low // wide + 1 > buckets:
        wide *= 2
    return wide


def within(steps: np.ndarray, low: int | None, high: int | None) -> slice:
    """Return the part of ascending steps from `low` to `high`, with one step more on either side, for lines."""
    start = 0 if low is None else int(np.searchsorted(steps, low, "left"))
    stop = len(steps) if high is None else int(np.searchsorted(steps, high, "right"))
    return slice(max(0, start - 1), min(len(steps), stop + 1))


def chosen(steps: np.ndarray, values: np.ndarray, points: int) -> np.ndarray:
    """Return ascending indices, int64, of about so many points to draw; all where there are no more.

    Of each bucket these are the lowest and the highest value, and one that is not finite; and the first and the last
    point of all; see [Note: buckets].
    """
    if len(steps) <= max(points, 2):
        return np.arange(len(steps))
    wide = width(int(steps[0]), int(steps[-1]), max(1, points // 2))
    buckets = steps // wide
    starts = np.flatnonzero(np.diff(buckets, prepend=buckets[0] - 1))
    bucket_of = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(steps)))
    is_finite = np.isfinite(values)
    lowest = np.minimum.reduceat(np.where(is_finite, values, np.inf), starts)
    highest = np.maximum.reduceat(np.where(is_finite, values, -np.inf), starts)
    found = [np.array([0, len(steps) - 1])]
    for wanted in (is_finite & (values == lowest[bucket_of]), is_finite & (values == highest[bucket_of]), ~is_finite):
        # The first of each bucket.
        places = np.flatnonzero(wanted)
        found.append(places[np.flatnonzero(np.diff(bucket_of[places], prepend=-1))])
    return np.unique(np.concatenate(found))


def plain(values: np.ndarray) -> list[float | None]:
    """Return values for JSON, which has no numbers that are not finite."""
    return [value if ok else None for value, ok in zip(values.tolist(), np.isfinite(values).tolist(), strict=True)]

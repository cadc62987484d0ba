"""Numbers by step, in columns that grow. Where a file goes back to an earlier step, later lines replace earlier ones.

That is the rule of `train.report.read_metrics`: a run that was killed goes on from its last checkpoint.
"""

from __future__ import annotations

import bisect
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .downsample import MOST_POINTS, chosen, plain, within
from .tail import number

MAX_COLUMNS = 2000
"""Further names are left out: norms of thousands of blocks would make a page that shows nothing."""
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

    def __contains__(self, name: str) -> bool:
        return name in self._columns

    @property
    def names(self) -> list[str]:
        """In the order in which they came; those of a group are "group/name"."""
        return [name for name, (steps, _) in self._columns.items() if steps]

    def clear(self) -> None:
        """Forget all."""
        self._columns.clear()
        self.version += 1
        self.last_step = 0

    def add(self, records: Sequence[Mapping[str, Any]]) -> int:
        """Add lines of a file of metrics; how many are none, for want of a step of 1 or more."""
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
            if len(signatures) == 1:
                at, values = steps, [record[name] for record in records]
            else:
                have = [place for place, record in enumerate(records) if name in record]
                at, values = array("q", [steps[place] for place in have]), [records[place][name] for place in have]
            types = set(map(type, values))
            if dict in types:
                groups = [place for place, value in enumerate(values) if type(value) is dict]
                self._put(
                    f"{prefix}{name}/", array("q", [at[place] for place in groups]), [values[place] for place in groups]
                )
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
        """Forget what is of this step or later."""
        for steps, values in self._columns.values():
            place = bisect.bisect_left(steps, step)
            del steps[place:], values[place:]

    def column(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps, int64 (N), and values, float64 (N), copied; both empty where there is none of that name."""
        steps, values = self._columns.get(name, (array("q"), array("d")))
        return np.array(steps, dtype=np.int64), np.array(values, dtype=np.float64)

    def last(self, name: str) -> float | None:
        """The latest value."""
        _, values = self._columns.get(name, ((), ()))
        return values[-1] if values else None

    def series(self, names: list[str], low: int | None, high: int | None, points: int) -> dict[str, Any]:
        """Points of columns within some steps, each column downsampled by itself; values of JSON."""
        found = {}
        for name in names:
            steps, values = self.column(name)
            part = within(steps, low, high)
            steps, values = steps[part], values[part]
            places = chosen(steps, values, min(points, MOST_POINTS))
            found[name] = {"x": steps[places].tolist(), "y": plain(values[places]), "count": len(steps)}
        return found

    def together(self, by: str, names: list[str], low: int | None, high: int | None, points: int) -> dict[str, Any]:
        """Points of several columns at the same steps, which the column `by` chooses; values of JSON.

        What is drawn one above the other must be of one step, or its sum would be of none.
        """
        steps, values = self.column(by)
        part = within(steps, low, high)
        steps, values = steps[part], values[part]
        at = steps[chosen(steps, values, min(points, MOST_POINTS))]
        found = {}
        for name in names:
            of, numbers = self.column(name)
            places = np.minimum(np.searchsorted(of, at), max(0, len(of) - 1))
            is_there = of[places] == at if len(of) else np.zeros(len(at), bool)
            found[name] = plain(np.where(is_there, numbers[places], np.nan)) if len(of) else [None] * len(at)
        return {"x": at.tolist(), "columns": found, "count": len(steps)}

"""Numbers by step, in columns that grow. Where a file goes back to an earlier step, later lines replace earlier ones.

That is the rule of `train.report.read_metrics`: a run that was killed goes on from its last checkpoint.
"""

from __future__ import annotations

import bisect
from array import array
from collections.abc import Mapping
from typing import Any

import numpy as np

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

    def add(self, record: Mapping[str, Any]) -> bool:
        """Add a line of a file of metrics; whether it is one, with a step of 1 or more."""
        step = record.get(STEP)
        # Beyond that, a step is no number of 8 bytes, nor one that a page could tell from the next.
        if type(step) is not int or not 1 <= step < 1 << 53:
            return False
        if step <= self.last_step:
            self._go_back(step)
        self.last_step = step
        self.version += 1
        for name, value in record.items():
            if name == STEP:
                continue
            if isinstance(value, dict):
                for inner, each in value.items():
                    self._put(f"{name}/{inner}", step, each)
            else:
                self._put(name, step, value)
        return True

    def _put(self, name: str, step: int, value: Any) -> None:
        found = value if type(value) is float else number(value)
        if found is None:
            return
        column = self._columns.get(name)
        if column is None:
            if len(self._columns) >= MAX_COLUMNS:
                self.left_out = True
                return
            column = self._columns[name] = (array("q"), array("d"))
        column[0].append(step)
        column[1].append(found)

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

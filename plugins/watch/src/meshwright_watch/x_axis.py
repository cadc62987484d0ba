"""The x axis of charts over steps: steps, time or tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .metric_columns import MetricColumns

STEP, TIME, TOKENS = X_AXES = ("step", "time", "tokens")


class XAxis:
    """Positions of a run's steps on an x axis.

    Args:
        metrics: of the run.
        name: "step", "time" (seconds since the first step began, with pauses), or "tokens" (supervised, of all ranks).
    """

    def __init__(self, metrics: MetricColumns, name: str) -> None:
        self._name = name
        if name == STEP:
            return
        self._steps, values = metrics.get_column("time" if name == TIME else "num_tokens")
        is_known = np.isfinite(values)
        self._steps, values = self._steps[is_known], values[is_known]
        if name == TIME and len(values):
            durations = dict(zip(*metrics.get_column("seconds", high=int(self._steps[0])), strict=True))
            first = np.nan_to_num(durations.get(self._steps[0], 0.0), posinf=0.0)
            # A clock may be set back.
            values = np.maximum.accumulate(values - values[0] + first)
        self._positions = values if name == TIME else np.cumsum(values)

    def to_steps(self, low: float | None, high: float | None) -> tuple[int | None, int | None]:
        """Return the steps that enclose a span of positions."""
        if self._name == STEP:
            return None if low is None else int(np.floor(low)), None if high is None else int(np.ceil(high))
        if not len(self._steps):
            return None, None
        last = len(self._steps) - 1
        first = 0 if low is None else int(np.searchsorted(self._positions, low, "right")) - 1
        end = last if high is None else int(np.searchsorted(self._positions, high, "left"))
        return int(self._steps[max(0, first)]), int(self._steps[min(last, end)])

    def place(self, line: dict[str, Any]) -> None:
        """Replace the steps "x" of a line by their positions; "at" keeps them."""
        if self._name == STEP:
            return
        line["at"] = line["x"]
        if len(self._steps):
            line["x"] = np.interp(line["x"], self._steps, self._positions).tolist()
        else:
            line["x"] = []  # This run does not know: nothing is drawn

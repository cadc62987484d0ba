"""Compare two runs: the first step in which they differ."""

from __future__ import annotations

from typing import Any

import numpy as np

from .columns import MOST_POINTS, chosen, plain, within

Column = tuple[np.ndarray, np.ndarray]
"""Steps, int64 (N), ascending, and values, float64 (N)."""
COMPARED = ("loss", "grad_norm")
RELATIVE = 1e-6
"""Sums in another order give differences below that for many steps; beyond it, two runs have parted."""


def compare(one: Column, other: Column, low: int | None, high: int | None, points: int) -> dict[str, Any]:
    """Compare a column of two runs by step, as values of JSON; two values that are both NaN are equal.

    Returns:
        `steps` that both have; `first`, the step that differs at all, and `parted`, by more than `RELATIVE`, each
        with both values; the `largest` of all relative differences |a - b| / max(|a|, |b|); and `x` and `y`, about
        so many points of them from `low` to `high`. What is not finite is None.
    """
    at, places, others = np.intersect1d(one[0], other[0], assume_unique=True, return_indices=True)
    a, b = one[1][places], other[1][others]
    differs = (a != b) & ~(np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        relative = np.where(differs, np.abs(a - b) / np.maximum(np.abs(a), np.abs(b)), 0.0)
    # One value is not finite, and the other is.
    relative = np.where(np.isfinite(relative), relative, np.inf)
    largest = float(relative.max(initial=0.0))

    def first(where: np.ndarray) -> dict[str, Any] | None:
        place = int(np.argmax(where)) if where.any() else None
        if place is None:
            return None
        return {"step": int(at[place]), "one": plain(a)[place], "other": plain(b)[place]}

    summary = {"steps": len(at), "first": first(differs), "parted": first(relative > RELATIVE)}
    part = within(at, low, high)
    shown = chosen(at[part], relative[part], min(points, MOST_POINTS))
    line = {"x": at[part][shown].tolist(), "y": plain(relative[part][shown])}
    return {**summary, "largest": largest if np.isfinite(largest) else None, **line}

"""Compare two runs: the first step in which they differ, and the settings of their run files that differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from .columns import MOST_POINTS, chosen, plain, within

Column = tuple[np.ndarray, np.ndarray]
"""Steps, int64 (N), ascending, and values, float64 (N)."""
COMPARED = ("loss", "grad_norm")
RELATIVE = 1e-6
"""Sums in another order give differences below that for many steps; beyond it, two runs have parted."""
MISSING = "(not set)"


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


def differing_settings(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return the keys of two run files whose values differ, with both as texts."""
    left, right = dict(_flat(one)), dict(_flat(other))
    pairs = {name: (left.get(name, MISSING), right.get(name, MISSING)) for name in {**left, **right}}
    return [(name, _text(mine), _text(theirs)) for name, (mine, theirs) in pairs.items() if mine != theirs]


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _text(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)

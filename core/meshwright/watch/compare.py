"""Two runs side by side: the first step in which they differ, and what their run files say differently."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Column = tuple[np.ndarray, np.ndarray]
"""Steps, int64 (N), ascending, and values, float64 (N)."""
COMPARED = ("loss", "grad_norm")
RELATIVE = 1e-6
"""Sums in another order give differences below that for many steps; beyond it, two runs have parted."""


@dataclass(frozen=True)
class Difference:
    """A step in which two runs differ, with the values of both."""

    step: int
    one: float
    other: float


@dataclass(frozen=True)
class Compared:
    """What two runs have in common in one column.

    Attributes:
        steps: how many both have.
        first: the first that differs at all; None: all are equal, bit by bit.
        parted: the first that differs by more than `RELATIVE`, relatively.
        largest: of all relative differences.
        at: the steps, int64 (N), and there `relative`, float64 (N): |a - b| / max(|a|, |b|).
    """

    steps: int
    first: Difference | None
    parted: Difference | None
    largest: float
    at: np.ndarray
    relative: np.ndarray


def compare(one: Column, other: Column) -> Compared:
    """Compare a column of two runs by step. Two values that are both not a number are equal."""
    at, places, others = np.intersect1d(one[0], other[0], assume_unique=True, return_indices=True)
    a, b = one[1][places], other[1][others]
    differs = (a != b) & ~(np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        relative = np.where(differs, np.abs(a - b) / np.maximum(np.abs(a), np.abs(b)), 0.0)
    # One that is not finite, beside one that is.
    relative = np.where(np.isfinite(relative), relative, np.inf)

    def first(where: np.ndarray) -> Difference | None:
        found = np.flatnonzero(where)
        return Difference(int(at[found[0]]), float(a[found[0]]), float(b[found[0]])) if len(found) else None

    largest = float(relative.max()) if len(relative) else 0.0
    return Compared(len(at), first(differs), first(relative > RELATIVE), largest, at, relative)


MISSING = "(not set)"


def differing_settings(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Keys of two run files whose values differ, with both as texts."""
    left, right = dict(_flat(one)), dict(_flat(other))
    names = [*left, *(name for name in right if name not in left)]
    return [
        (name, _shown(left.get(name, MISSING)), _shown(right.get(name, MISSING)))
        for name in names
        if left.get(name, MISSING) != right.get(name, MISSING)
    ]


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}.")
        else:
            yield name, value


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)

"""Which ranks are slower than the others, by medians: what few ranks do moves neither the middle nor the scale."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

FROM = 3.5
"""Deviations from which a rank is a straggler; Iglewicz and Hoaglin 1993 for outliers by the modified z-score."""
SCALE = 1.4826
"""Of a normal distribution, the standard deviation in median absolute deviations."""
LEAST = 0.02
"""And so much of a step must a rank be slower: where all are equal to a microsecond, any is an outlier."""
RANKS = 4
"""Of fewer, none is told from the others."""


@dataclass(frozen=True)
class Straggler:
    """A rank that is slower than others.

    Attributes:
        part: of the step: "seconds" for the whole, or a part by its name.
        seconds: its median.
        middle: the median of all ranks.
        deviations: how far it is from that.
    """

    rank: int
    part: str
    seconds: float
    middle: float
    deviations: float


def stragglers(ranks: list[int], part: str, seconds: np.ndarray, *, step_seconds: float) -> list[Straggler]:
    """The stragglers by one part of the step, the slowest first.

    Args:
        ranks: (R).
        seconds: the median of each rank over some steps, float64 (R); NaN where it has none.
        step_seconds: the median of whole steps.
    """
    known = seconds[np.isfinite(seconds)]
    if len(known) < RANKS:
        return []
    middle = float(np.median(known))
    scale = SCALE * float(np.median(np.abs(known - middle)))
    found = []
    for rank, value in zip(ranks, seconds.tolist(), strict=True):
        beyond = value - middle
        if np.isfinite(value) and beyond > LEAST * step_seconds and beyond > FROM * scale:
            found.append(Straggler(rank, part, value, middle, beyond / scale if scale else float("inf")))
    return sorted(found, key=lambda each: each.seconds, reverse=True)

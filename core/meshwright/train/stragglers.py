"""Which ranks are slower than the others, by medians: what few ranks do moves neither the middle nor the scale.

[Note: a rank's own seconds] Ranks wait for each other in every step, so that a slow one makes all steps long. What
tells it from the others is what it does without them: it draws microbatches, steps the optimizer, and calls observers
and callbacks. What is slow within forward and backward is not among it, since others wait there. A machine that has
other work for a moment makes any rank slow, so that one is named only when it has been slow for as many steps more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..mesh.progress import Progress, Sign
from .run_sections import StragglersConfig

FROM = 3.5
"""Deviations from which a rank is a straggler; Iglewicz and Hoaglin 1993 for outliers by the modified z-score."""
SCALE = 1.4826
"""Of a normal distribution, the standard deviation in median absolute deviations."""
LEAST = 0.02
"""And so much of a step must a rank be slower: where all are equal to a microsecond, any is an outlier."""
LEAST_OWN, LEAST_OWN_S = 0.05, 0.005
"""By its own seconds a rank is named that is slower by so much of a step, and by so many seconds."""
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


def stragglers(
    ranks: list[int],
    part: str,
    seconds: np.ndarray,
    *,
    step_seconds: float,
    deviations: float = FROM,
    least_s: float | None = None,
) -> list[Straggler]:
    """The stragglers by one part of the step, the slowest first.

    Args:
        ranks: (R).
        seconds: the median of each rank over some steps, float64 (R); NaN where it has none.
        step_seconds: the median of whole steps.
        deviations: from which a rank is one.
        least_s: by so many seconds it must be slower; None: by `LEAST` of a step.
    """
    least_s = LEAST * step_seconds if least_s is None else least_s
    known = seconds[np.isfinite(seconds)]
    if len(known) < RANKS:
        return []
    middle = float(np.median(known))
    scale = SCALE * float(np.median(np.abs(known - middle)))
    found = []
    for rank, value in zip(ranks, seconds.tolist(), strict=True):
        beyond = value - middle
        if np.isfinite(value) and beyond > least_s and beyond > deviations * scale:
            found.append(Straggler(rank, part, value, middle, beyond / scale if scale else float("inf")))
    return sorted(found, key=lambda each: each.seconds, reverse=True)


class Stragglers:
    """The stragglers of a run, on its first rank, by what the others' signs of life say; see
    [Note: a rank's own seconds]. Asking it costs nothing until there are new signs.

    Args:
        progress: of this rank, which holds as many steps as are asked for.
    """

    def __init__(self, config: StragglersConfig, progress: Progress) -> None:
        self._config, self._progress = config, progress
        self._seen: Mapping[int, Sign] = {}
        self._found: tuple[Mapping[str, float], ...] = ()
        self._since: dict[int, int] = {}

    def __call__(self) -> Sequence[Mapping[str, float]]:
        """As `StepResult.stragglers` is."""
        if self._progress.signs is not self._seen:
            self._seen = self._progress.signs
            self._found = self._judged()
        return self._found

    def _judged(self) -> tuple[Mapping[str, float], ...]:
        known = {rank: sign for rank, sign in self._seen.items() if sign.steps >= self._config.over}
        if not known:
            return ()
        step_s = float(np.median([sign.step_s for sign in known.values()]))
        found = stragglers(
            list(known),
            "own",
            np.array([sign.own_s for sign in known.values()]),
            step_seconds=step_s,
            deviations=self._config.deviations,
            least_s=max(LEAST_OWN * step_s, LEAST_OWN_S),
        )
        step = max(sign.at.step for sign in known.values())
        self._since = {each.rank: self._since.get(each.rank, step) for each in found}
        return tuple(
            {"rank": each.rank, "seconds": each.seconds, "median": each.middle, "deviations": each.deviations}
            for each in found
            if step - self._since[each.rank] >= self._config.over
        )

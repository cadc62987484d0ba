"""Find ranks that are slower than the others, by medians, which few ranks do not move. No torch in this module.

[Note: a rank's own seconds] Ranks wait for each other in every step, so a slow one makes all steps long. It is told
from the others by what it does without them: drawing microbatches, stepping the optimizer, observers and callbacks.
Forward and backward do not count, since others wait there. A rank is named only when it has been slow for as many steps
more, since other work on its machine makes any rank slow for a moment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshwright.plugin import LoopExtension, Progress, Sign, StepResult

from .run_sections import StragglersConfig

FROM = 3.5
"""Deviations from which a rank is a straggler; Iglewicz and Hoaglin 1993, modified z-score."""
SCALE = 1.4826
"""Standard deviation of a normal distribution in median absolute deviations."""
LEAST = 0.02
"""Part of a step by which a rank must be slower: where all are equal to a microsecond, any is an outlier."""
LEAST_OWN, LEAST_OWN_S = 0.05, 0.005
"""The same for a rank's own seconds: part of a step, and seconds."""
RANKS = 4
"""Fewer ranks have no stragglers."""


@dataclass(frozen=True)
class Straggler:
    """A rank that is slower than others in a part of the step, or in all of it ("seconds"), by medians."""

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
    """Return the stragglers by one part of the step, the slowest first. `seconds` are medians of `ranks`, float64 (R);
    NaN where there is none."""
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


class Stragglers(LoopExtension):
    """Reports the stragglers of a run on its first rank, by the others' signs of life; see
    [Note: a rank's own seconds]."""

    def __init__(self, config: StragglersConfig, progress: Progress) -> None:
        self._config, self._progress = config, progress
        self._seen: Mapping[int, Sign] = {}
        self._found: tuple[Mapping[str, float], ...] = ()
        self._since: dict[int, int] = {}

    def __call__(self) -> Sequence[Mapping[str, float]]:
        """See `StepResult.stragglers`."""
        if self._progress.signs is not self._seen:
            self._seen = self._progress.signs
            self._found = self._judged()
        return self._found

    def after_step(self, result: StepResult) -> StepResult:
        return replace(result, stragglers=self())

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

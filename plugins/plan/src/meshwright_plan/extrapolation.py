"""What a large job holds, sends and takes, extrapolated from smaller jobs that are otherwise the same.

What a rank holds and sends grows by the same for each block, for each microbatch after the first, and for each pair of
them. A few small jobs tell by how much, and one that is larger in both checks it; where the check fails, the job is
traced as it is. Seconds grow nearly evenly: what the check shows to be off is taken to grow with the blocks. What an
allocator reserves beyond the peak varies: where the two largest show no growth, the most of all is taken.

[Note: frames] n + 1 points determine all that is linear in n numbers: its value anywhere is a sum of its values at the
points, with weights whose sum is 1.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeAlias

Coordinates: TypeAlias = tuple[int, ...]
Point: TypeAlias = tuple[Coordinates, Coordinates]
"""Size of a job: blocks (of each part of the model), and microbatches (and what else is counted)."""
RankReport: TypeAlias = dict[str, Any]
WeightedValues: TypeAlias = Sequence[tuple[Fraction, Any]]  # Weights and values

SAMPLE_DEPTHS = ((2, 4, 6), (4, 6, 8), (6, 8, 10))
"""Blocks of the models that are traced, the last of each to check; even, since some models alternate. The deeper ones
are tried next, since in a shallow model the peak may lie elsewhere."""
SAMPLE_MICROBATCHES = (2, 3, 4)  # As well; the first microbatch differs from the others
PEAK_KEY, PEAK_BY_PHASE_KEY, RESERVED_KEY = "peak_allocated_bytes", "peak_by_phase", "peak_reserved_bytes"
APPROXIMATE_KEYS = (RESERVED_KEY, "step_seconds", "busy_seconds", PEAK_BY_PHASE_KEY)  # Values that need not grow evenly


class NotLinearError(Exception):
    """Small jobs do not determine a large one."""


@dataclass(frozen=True)
class Extrapolation:
    """Small jobs that determine larger ones; see [Note: frames]."""

    blocks: tuple[Coordinates, ...]  # with `microbatches` a frame each; a single point if all jobs have the same number
    microbatches: tuple[Coordinates, ...]
    check_point: Point  # a job that is larger than those of the frames

    @property
    def corners(self) -> list[Point]:
        return list(itertools.product(self.blocks, self.microbatches))

    @property
    def points(self) -> list[Point]:
        return list(dict.fromkeys([*self.corners, self.check_point]))

    def extrapolate(self, point: Point, reports: Mapping[Point, RankReport]) -> RankReport:
        """Return the report of a job from those of `points`; raise NotLinearError if the check fails."""
        reported, checked = self.interpolate(self.check_point, reports), reports[self.check_point]
        if not reports_match(reported, checked):
            raise NotLinearError
        made = self.interpolate(point, reports)
        last = max(map(sum, self.blocks))
        step = sum(self.check_point[0]) - last
        # How far the job lies behind the frame of blocks, where the check lies at 1.
        beyond = max(Fraction(0), Fraction(sum(point[0]) - last, step)) if step else Fraction(0)
        for key in APPROXIMATE_KEYS:
            if key in checked and key != RESERVED_KEY:
                made[key] = combine_approximately(
                    ((Fraction(1), made[key]), (-beyond, reported[key]), (beyond, checked[key]))
                )
        if made[PEAK_KEY] != max(made[PEAK_BY_PHASE_KEY].values()):
            raise NotLinearError
        if RESERVED_KEY in made:
            made[RESERVED_KEY] = made[PEAK_KEY] + self._extrapolate_spare(point, reports)
        return made

    def _extrapolate_spare(self, point: Point, reports: Mapping[Point, RankReport]) -> int:
        spare = {each: reports[each][RESERVED_KEY] - reports[each][PEAK_KEY] for each in self.points}
        last = self.corners[-1]
        step, beyond = (
            sum(each[0]) - sum(from_[0]) for each, from_ in ((self.check_point, last), (point, self.check_point))
        )
        growth = (spare[self.check_point] - spare[last]) / step if step > 0 else 0
        return int(max(*spare.values(), spare[self.check_point] + growth * beyond))

    def interpolate(self, point: Point, reports: Mapping[Point, RankReport]) -> RankReport:
        """Return the report of a job as `at` does, without the check."""
        pairs = itertools.product(_solve_weights(self.blocks, point[0]), _solve_weights(self.microbatches, point[1]))
        return combine_reports(
            [(one * other, reports[corner]) for (one, other), corner in zip(pairs, self.corners, strict=True)]
        )


def extrapolate_report(
    get_reports: Callable[[Sequence[Point]], Mapping[Point, RankReport]], num_layers: int | None, num_microbatches: int
) -> RankReport | None:
    """Return the report of a job from those (`get_reports`) of small ones; None if these do not determine it."""
    wanted = (() if num_layers is None else (num_layers,), (num_microbatches,))
    for net in _list_extrapolations(num_layers, num_microbatches):
        try:
            return net.extrapolate(wanted, get_reports(net.points))
        except NotLinearError:
            continue
    return None


def _list_extrapolations(layers: int | None, microbatches: int) -> list[Extrapolation]:
    steps: Sequence[int] = SAMPLE_MICROBATCHES if microbatches > SAMPLE_MICROBATCHES[-1] else [microbatches]
    counts, last, deep = tuple((each,) for each in steps[:2]), (steps[-1],), layers or 0
    nets = [
        Extrapolation(((few,), (more,)), counts, ((most,), last))
        for few, more, most in SAMPLE_DEPTHS
        if deep > few + more + most
    ]
    if microbatches > sum(SAMPLE_MICROBATCHES):
        own = () if layers is None else (layers,)
        nets.append(Extrapolation((own,), counts, (own, last)))
    return nets


def _solve_weights(frame: Sequence[Coordinates], point: Coordinates) -> list[Fraction]:
    """Return the weights with which `point` is a sum of the frame's points; see [Note: frames]."""
    if len(frame) == 1:
        if frame[0] != point:
            raise NotLinearError
        return [Fraction(1)]
    # Gauss-Jordan elimination of [1 ... 1 | 1] and a row for each coordinate.
    rows = [[Fraction(1)] * (len(frame) + 1)]
    rows += [[Fraction(number) for number in numbers] for numbers in zip(*frame, point, strict=False)]
    for place in range(len(frame)):
        pivot = next(row for row in rows[place:] if row[place])
        rows.remove(pivot)
        rows.insert(place, [number / pivot[place] for number in pivot])
        for other, row in enumerate(rows):
            if other != place:
                rows[other] = [a - row[place] * b for a, b in zip(row, rows[place], strict=True)]
    return [row[-1] for row in rows]


def combine_reports(terms: Sequence[tuple[Fraction, RankReport]]) -> RankReport:
    """Return the weighted sum of reports: exact, except for `APPROXIMATE_KEYS`."""
    return {
        key: (combine_approximately if key in APPROXIMATE_KEYS else _combine_exactly)(
            [(factor, report[key]) for factor, report in terms]
        )
        for key in terms[0][1]
    }


def reports_match(one: RankReport, other: RankReport, *, tolerance: int = 0) -> bool:
    """Return whether two reports agree in all that grows evenly, numbers up to `tolerance`."""
    keys = one.keys() | other.keys()
    return all(_values_match(one[key], other[key], tolerance) for key in keys if key not in APPROXIMATE_KEYS)


def _values_match(one: Any, other: Any, tolerance: int) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_values_match(one[key], other[key], tolerance) for key in one)
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return all(_values_match(*pair, tolerance) for pair in zip(one, other, strict=True))
    return bool(one == other or (type(one) is type(other) is int and abs(one - other) <= tolerance))


def _combine_exactly(terms: WeightedValues) -> Any:
    """Return the exact weighted sum; raise NotLinearError if kinds differ, or the sum is no integer."""
    values = [value for _, value in terms]
    first = values[0]
    if isinstance(first, bool | str) and all(value == first for value in values):
        return first
    if all(type(value) is int for value in values):
        total = sum(factor * value for factor, value in terms)
        if total.denominator == 1:
            return int(total)
    elif all(isinstance(value, dict) for value in values):
        # What one does not name is 0, and what is 0 is not named.
        names = dict.fromkeys(name for value in values for name in value)
        everywhere = {name for name in names if all(name in value for value in values)}
        made = {name: _combine_exactly([(factor, value.get(name, 0)) for factor, value in terms]) for name in names}
        return {name: value for name, value in made.items() if name in everywhere or value}
    elif all(isinstance(value, list) and len(value) == len(first) for value in values):
        factors = [factor for factor, _ in terms]
        return [_combine_exactly(list(zip(factors, row, strict=True))) for row in zip(*values, strict=True)]
    raise NotLinearError


def combine_approximately(terms: WeightedValues) -> Any:
    """Return the weighted sum of values in floating point; what one lacks is 0."""
    first = terms[0][1]
    if isinstance(first, dict):
        return {key: combine_approximately([(factor, value.get(key, 0.0)) for factor, value in terms]) for key in first}
    total = sum(float(factor) * value for factor, value in terms)
    return round(total) if isinstance(first, int) else total

"""Extrapolate memory, communication and time of a large job from smaller jobs that are otherwise equal.

Memory and communication of a rank grow by a constant for each block, for each microbatch after the first, and for each
pair of both. A few small jobs determine these constants, and a job that is larger in both directions checks them. If
the check fails, the full job is traced. Time grows almost linearly: the error that the check shows is assumed to grow
with the blocks. The reserved memory beyond the peak varies: it is the maximum of all jobs, plus the growth between the
two largest, if any.

[Note: frames] n + 1 points determine a function that is linear in n numbers: its value anywhere is a sum of its values
at the points, with weights whose sum is 1.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeAlias

Coordinates: TypeAlias = tuple[int, ...]
Point: TypeAlias = tuple[Coordinates, Coordinates]
"""Size of a job: blocks (of each part of the model), and microbatches (and other counts, such as ranks)."""
RankReport: TypeAlias = dict[str, Any]
WeightedValues: TypeAlias = Sequence[tuple[Fraction, Any]]  # Pairs of weight and value

SAMPLE_DEPTHS = ((2, 4, 6), (4, 6, 8), (6, 8, 10))
"""Blocks of the traced models; the last of each tuple is the check. Even, since some models alternate block types.
Deeper models are tried if shallow ones fail, since the peak of a shallow model may be elsewhere."""
SAMPLE_MICROBATCHES = (2, 3, 4)  # Microbatches of the traced steps; the first microbatch differs from the others
PEAK_KEY, PEAK_BY_PHASE_KEY, RESERVED_KEY = "peak_allocated_bytes", "peak_by_phase", "peak_reserved_bytes"
APPROXIMATE_KEYS = (
    RESERVED_KEY,
    "step_seconds",
    "busy_seconds",
    PEAK_BY_PHASE_KEY,
)  # Values that need not grow linearly


class NotLinearError(Exception):
    """Small jobs do not determine the report of a large one."""


@dataclass(frozen=True)
class Extrapolation:
    """Small jobs whose reports determine those of larger jobs; see [Note: frames]."""

    blocks: tuple[Coordinates, ...]  # a frame, like `microbatches`; a single point if all jobs have the same number
    microbatches: tuple[Coordinates, ...]
    check_point: Point  # a job larger than those of the frames

    @property
    def corners(self) -> list[Point]:
        return list(itertools.product(self.blocks, self.microbatches))

    @property
    def points(self) -> list[Point]:
        return list(dict.fromkeys([*self.corners, self.check_point]))

    def extrapolate(self, point: Point, reports: Mapping[Point, RankReport]) -> RankReport:
        """Return the report of a job from the reports of `points`. Raise NotLinearError if the check fails."""
        predicted, checked = self.interpolate(self.check_point, reports), reports[self.check_point]
        if not reports_match(predicted, checked):
            raise NotLinearError
        report = self.interpolate(point, reports)
        last = max(map(sum, self.blocks))
        step = sum(self.check_point[0]) - last
        # Distance of the job beyond the frame of blocks, in units of the distance of the check.
        beyond = max(Fraction(0), Fraction(sum(point[0]) - last, step)) if step else Fraction(0)
        for key in APPROXIMATE_KEYS:
            if key in checked and key != RESERVED_KEY:
                report[key] = combine_approximately(
                    ((Fraction(1), report[key]), (-beyond, predicted[key]), (beyond, checked[key]))
                )
        if report[PEAK_KEY] != max(report[PEAK_BY_PHASE_KEY].values()):
            raise NotLinearError
        if RESERVED_KEY in report:
            report[RESERVED_KEY] = report[PEAK_KEY] + self._extrapolate_spare(point, reports)
        return report

    def _extrapolate_spare(self, point: Point, reports: Mapping[Point, RankReport]) -> int:
        spare = {each: reports[each][RESERVED_KEY] - reports[each][PEAK_KEY] for each in self.points}
        last = self.corners[-1]
        step, beyond = (
            sum(each[0]) - sum(from_[0]) for each, from_ in ((self.check_point, last), (point, self.check_point))
        )
        growth = (spare[self.check_point] - spare[last]) / step if step > 0 else 0
        return int(max(*spare.values(), spare[self.check_point] + growth * beyond))

    def interpolate(self, point: Point, reports: Mapping[Point, RankReport]) -> RankReport:
        """Return the report of a job like `extrapolate`, but without the check."""
        pairs = itertools.product(_solve_weights(self.blocks, point[0]), _solve_weights(self.microbatches, point[1]))
        return combine_reports(
            [(one * other, reports[corner]) for (one, other), corner in zip(pairs, self.corners, strict=True)]
        )


def extrapolate_report(
    get_reports: Callable[[Sequence[Point]], Mapping[Point, RankReport]], num_layers: int | None, num_microbatches: int
) -> RankReport | None:
    """Return the report of a job from those of small jobs (`get_reports`); None if these do not determine it."""
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
    """Return the weights that combine the points of a frame into `point`; see [Note: frames]."""
    if len(frame) == 1:
        if frame[0] != point:
            raise NotLinearError
        return [Fraction(1)]
    # Gauss-Jordan elimination: a row [1 ... 1 | 1], and one row for each coordinate.
    rows = [[Fraction(1)] * (len(frame) + 1)]
    rows += [[Fraction(number) for number in numbers] for numbers in zip(*frame, point, strict=False)]
    for column in range(len(frame)):
        pivot = next(row for row in rows[column:] if row[column])
        rows.remove(pivot)
        rows.insert(column, [number / pivot[column] for number in pivot])
        for other, row in enumerate(rows):
            if other != column:
                rows[other] = [a - row[column] * b for a, b in zip(row, rows[column], strict=True)]
    return [row[-1] for row in rows]


def combine_reports(terms: Sequence[tuple[Fraction, RankReport]]) -> RankReport:
    """Return the weighted sum of reports, exact except for `APPROXIMATE_KEYS`."""
    return {
        key: (combine_approximately if key in APPROXIMATE_KEYS else _combine_exactly)(
            [(factor, report[key]) for factor, report in terms]
        )
        for key in terms[0][1]
    }


def reports_match(one: RankReport, other: RankReport, *, tolerance: int = 0) -> bool:
    """Return whether two reports agree in all keys but `APPROXIMATE_KEYS`, integers up to `tolerance`."""
    keys = one.keys() | other.keys()
    return all(_values_match(one[key], other[key], tolerance) for key in keys if key not in APPROXIMATE_KEYS)


def _values_match(one: Any, other: Any, tolerance: int) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_values_match(one[key], other[key], tolerance) for key in one)
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return all(_values_match(*pair, tolerance) for pair in zip(one, other, strict=True))
    return bool(one == other or (type(one) is type(other) is int and abs(one - other) <= tolerance))


def _combine_exactly(terms: WeightedValues) -> Any:
    """Return the exact weighted sum. Raise NotLinearError if types differ or the sum is not an integer."""
    values = [value for _, value in terms]
    first = values[0]
    if isinstance(first, bool | str) and all(value == first for value in values):
        return first
    if all(type(value) is int for value in values):
        total = sum(factor * value for factor, value in terms)
        if total.denominator == 1:
            return int(total)
    elif all(isinstance(value, dict) for value in values):
        # A missing name means 0, and a sum of 0 is omitted.
        names = dict.fromkeys(name for value in values for name in value)
        everywhere = {name for name in names if all(name in value for value in values)}
        sums = {name: _combine_exactly([(factor, value.get(name, 0)) for factor, value in terms]) for name in names}
        return {name: value for name, value in sums.items() if name in everywhere or value}
    elif all(isinstance(value, list) and len(value) == len(first) for value in values):
        factors = [factor for factor, _ in terms]
        return [_combine_exactly(list(zip(factors, row, strict=True))) for row in zip(*values, strict=True)]
    raise NotLinearError


def combine_approximately(terms: WeightedValues) -> Any:
    """Return the weighted sum of values in floating point; keys missing from a value are 0."""
    first = terms[0][1]
    if isinstance(first, dict):
        return {key: combine_approximately([(factor, value.get(key, 0.0)) for factor, value in terms]) for key in first}
    total = sum(float(factor) * value for factor, value in terms)
    return round(total) if isinstance(first, int) else total

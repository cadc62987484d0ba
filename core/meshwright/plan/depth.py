"""What a large job holds, sends and takes, from smaller ones that are otherwise the same.

Blocks are alike, and so are microbatches behind the first: what a rank holds and sends grows by the same for each
block, for each microbatch, and for each pair of them. A few small jobs tell by how much, and one that is larger in both
ways whether it is so; where it is not (blocks differ, or another part of the step would hold the most), the job is
traced as it is. Seconds, and what an allocator reserves, grow by nearly the same: what the check shows to be off is
taken to grow with the blocks.

[Note: frames] Of n numbers, n + 1 points that tell all that is linear in them: its value anywhere is the sum of their
values with weights whose sum is 1.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

Numbers = tuple[int, ...]
Point = tuple[Numbers, Numbers]
"""How large a job is: blocks (of each part of the model), and microbatches (and what else is counted beside them)."""
Report = dict[str, Any]
Terms = Sequence[tuple[Fraction, Any]]
"""Values with their weights."""

DEPTHS = ((2, 4, 6), (4, 6, 8), (6, 8, 10))
"""Blocks of the models that are traced, the last of each to check; even, since some models alternate. The next where
one does not tell: in a shallow model the peak may lie elsewhere."""
MICROBATCHES = (2, 3, 4)
"""Likewise; the first alone is not as the others are."""
PEAK, PHASES, RESERVED = "peak_allocated_bytes", "peak_by_phase", "peak_reserved_bytes"
NEARLY = (RESERVED, "step_seconds", "busy_seconds", PHASES)
"""What need not grow evenly; of parts of a step those in which less is held."""


class NotLinear(Exception):
    """Small jobs do not tell what a large one does."""


@dataclass(frozen=True)
class Net:
    """Small jobs that tell what larger ones do; see [Note: frames].

    Attributes:
        blocks, microbatches: a frame each; of one point: what all have.
        check: a job that is larger than those of the frames.
    """

    blocks: tuple[Numbers, ...]
    microbatches: tuple[Numbers, ...]
    check: Point

    @property
    def corners(self) -> list[Point]:
        return list(itertools.product(self.blocks, self.microbatches))

    @property
    def points(self) -> list[Point]:
        """All that is to be traced."""
        return list(dict.fromkeys([*self.corners, self.check]))

    def at(self, point: Point, found: Mapping[Point, Report]) -> Report:
        """What follows for a job.

        Args:
            found: numbers, texts, and mappings and lists of these, of each of `points`; what the check does not have
                is not checked.

        Raises:
            NotLinear: the check fails, or the job is out of reach.
        """
        told, checked = self.between(self.check, found), found[self.check]
        if not are_alike(told, checked):
            raise NotLinear
        made = self.between(point, found)
        beyond = self._beyond(point)
        for key in NEARLY:
            if key in checked:
                terms = (Fraction(1), made[key]), (-beyond, told[key]), (beyond, checked[key])
                made[key] = nearly_combined(terms)
        if made[PEAK] != max(made[PHASES].values()):
            raise NotLinear
        if RESERVED in made:
            # Granules of small jobs may tell less.
            made[RESERVED] = max(made[RESERVED], made[PEAK])
        return made

    def between(self, point: Point, found: Mapping[Point, Report]) -> Report:
        """As `at`, without the check."""
        pairs = itertools.product(weights(self.blocks, point[0]), weights(self.microbatches, point[1]))
        return mixed([(one * other, found[corner]) for (one, other), corner in zip(pairs, self.corners, strict=True)])

    def _beyond(self, point: Point) -> Fraction:
        """How far it lies behind the frame of blocks, where the check lies at 1."""
        last = max(map(sum, self.blocks))
        step = sum(self.check[0]) - last
        return max(Fraction(0), Fraction(sum(point[0]) - last, step)) if step else Fraction(0)


def at_full_size(
    found: Callable[[Sequence[Point]], Mapping[Point, Report]], layers: int | None, microbatches: int
) -> Report | None:
    """What a step on many blocks and microbatches is, as far as it follows from few.

    Args:
        found: of steps with (blocks,), (microbatches,).
        layers: blocks of the model; None: they cannot be changed, and are not asked for.

    Returns:
        None where it does not follow, or where few are not fewer.
    """
    wanted = (() if layers is None else (layers,), (microbatches,))
    for net in _nets(layers, microbatches):
        try:
            return net.at(wanted, found(net.points))
        except NotLinear:
            continue
    return None


def _nets(layers: int | None, microbatches: int) -> list[Net]:
    few: Sequence[int] = MICROBATCHES if microbatches > MICROBATCHES[-1] else [microbatches]
    counts, last = tuple((each,) for each in few[:2]), (few[-1],)
    nets = [
        Net(((depths[0],), (depths[1],)), counts, ((depths[2],), last))
        for depths in DEPTHS
        if layers is not None and layers > sum(depths)
    ]
    if microbatches > sum(MICROBATCHES):
        own = () if layers is None else (layers,)
        nets.append(Net((own,), counts, (own, last)))
    return nets


def weights(frame: Sequence[Numbers], point: Numbers) -> list[Fraction]:
    """With which a point is the sum of those of a frame; see [Note: frames].

    Raises:
        NotLinear: it lies elsewhere than the only point of the frame.
    """
    if len(frame) == 1:
        if frame[0] != point:
            raise NotLinear
        return [Fraction(1)]
    rows = [[Fraction(1)] * (len(frame) + 1)]
    rows += [[Fraction(number) for number in numbers] for numbers in zip(*frame, point, strict=False)]
    rows = [list(row) for row in rows]
    for place in range(len(frame)):
        pivot = next(row for row in rows[place:] if row[place])
        rows.remove(pivot)
        rows.insert(place, [number / pivot[place] for number in pivot])
        for other, row in enumerate(rows):
            if other != place:
                rows[other] = [a - row[place] * b for a, b in zip(row, rows[place], strict=True)]
    return [row[-1] for row in rows]


def mixed(terms: Sequence[tuple[Fraction, Report]]) -> Report:
    """The sum of reports: to the last digit, but for what need not grow evenly.

    Raises:
        NotLinear: see `combined`.
    """
    return {
        key: (nearly_combined if key in NEARLY else combined)([(factor, report[key]) for factor, report in terms])
        for key in terms[0][1]
    }


def are_alike(one: Report, other: Report, *, within: int = 0) -> bool:
    """Whether two reports are the same in all that grows evenly; numbers up to so much."""
    keys = one.keys() | other.keys()
    return all(_is_like(one[key], other[key], within) for key in keys if key not in NEARLY)


def _is_like(one: Any, other: Any, within: int) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_like(one[key], other[key], within) for key in one)
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return all(_is_like(*pair, within) for pair in zip(one, other, strict=True))
    return bool(one == other or (type(one) is type(other) is int and abs(one - other) <= within))


def combined(terms: Terms) -> Any:
    """The sum of values, to the last digit.

    Raises:
        NotLinear: they are not alike in kind, or their sum is no whole number.
    """
    values = [value for _, value in terms]
    first = values[0]
    if isinstance(first, bool | str) and all(value == first for value in values):
        return first
    if all(type(value) is int for value in values):
        total = sum(factor * value for factor, value in terms)
        if total.denominator == 1:
            return int(total)
    elif all(isinstance(value, dict) for value in values):
        return _combined_by_name(terms)
    elif all(isinstance(value, list) and len(value) == len(first) for value in values):
        factors = [factor for factor, _ in terms]
        return [combined(list(zip(factors, row, strict=True))) for row in zip(*values, strict=True)]
    raise NotLinear


def _combined_by_name(terms: Terms) -> dict[str, Any]:
    """Of numbers by name, what one does not name is 0, and what is 0 is not named."""
    names = dict.fromkeys(name for _, value in terms for name in value)
    everywhere = {name for name in names if all(name in value for _, value in terms)}
    made = {name: combined([(factor, value.get(name, 0)) for factor, value in terms]) for name in names}
    return {name: value for name, value in made.items() if name in everywhere or value}


def nearly_combined(terms: Terms) -> Any:
    """The sum of values, as far as numbers with a point go; what one does not have is 0."""
    first = terms[0][1]
    if isinstance(first, dict):
        return {key: nearly_combined([(factor, value.get(key, 0.0)) for factor, value in terms]) for key in first}
    total = sum(float(factor) * value for factor, value in terms)
    return round(total) if isinstance(first, int) else total

"""Choose what blocks hold for backward within a budget of bytes, so that least is computed again. No torch.

A block is held whole, or it holds its inputs and some results of its operators; the others are computed again when its
backward begins. That is a multiple-choice knapsack: each block goes along the lower convex hull of (bytes held, cost of
computing again), the step that saves most per byte first, whichever block it belongs to; a step that does not fit ends
its block. Then single operators fill what is left. The result costs more than the best one by less than one step.
Source: Sinha and Zoltners 1979, "The multiple-choice knapsack problem"; for the budget of bytes against operations,
Jain et al. 2020, arXiv:1910.02653.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Operator:
    """Something that a block computes and may hold: bytes (at least 1) of its results, cost of recomputing it."""

    key: Hashable
    bytes: int
    cost: float


@dataclass(frozen=True)
class Profile:
    """What one call of a block holds and computes; `cost` is that of computing all again."""

    inputs: int
    """Bytes of what it is given, which are held in any case."""
    whole: int
    """Bytes that it holds besides if nothing is computed again."""
    cost: float
    operators: tuple[Operator, ...]
    """What may be held; all else is computed again unless the block is held whole."""


@dataclass(frozen=True)
class Moment:
    """The start of a backward of `stage`; `in_flight` counts, for each stage of this rank, the microbatches whose
    forward is done and whose backward is not."""

    in_flight: tuple[int, ...]
    stage: int


ONE_STAGE = (Moment((1,), 0),)
"""Moments of forwards and backwards in turn."""


@dataclass
class Choice:
    """What one call of a block holds besides its inputs: everything, or results of the operators with these keys.
    `cost` is that of what is computed again."""

    whole: bool
    keys: frozenset[Hashable]
    bytes: int
    cost: float


class Choices:
    """The choices `made` for all blocks of a rank, by stage and in the order of calls; at first, inputs alone."""

    def __init__(self, stages: Sequence[Sequence[Profile]], moments: Sequence[Moment]) -> None:
        self.stages, self.moments = stages, moments
        self.made = [[Choice(False, frozenset(), 0, each.cost) for each in stage] for stage in stages]
        self._released: set[Hashable] = set()

    @property
    def peak(self) -> int:
        """Most bytes held at any moment: of all microbatches in flight, and of the block whose backward runs."""
        held, on_top = zip(*map(self._held, range(len(self.stages))), strict=True)
        return max(
            sum(count * each for count, each in zip(moment.in_flight, held, strict=True)) + on_top[moment.stage]
            for moment in self.moments
        )

    @property
    def cost(self) -> float:
        return sum(choice.cost for stage in self.made for choice in stage)

    def fill(self, limit: int) -> None:
        ended: set[tuple[int, int]] = set()
        for stage, block, choice in self._steps():
            if (stage, block) not in ended and not self._take(stage, block, choice, limit):
                ended.add((stage, block))
        self.top_up(limit)

    def release(self, stage: int, key: Hashable, holds: Sequence[int]) -> None:
        """Let calls of blocks for which `holds` has a 0 compute an operator again; `top_up` will not hold it."""
        for block, (profile, is_held) in enumerate(zip(self.stages[stage], holds, strict=True)):
            released = next((each for each in profile.operators if each.key == key), None)
            now = self.made[stage][block]
            if released is None:
                continue
            self._released.add(key)
            if not is_held and now.whole:
                self.made[stage][block] = Choice(False, frozenset(), 0, profile.cost)
            elif not is_held and key in now.keys:
                keys = now.keys - {key}
                self.made[stage][block] = Choice(False, keys, now.bytes - released.bytes, now.cost + released.cost)

    def top_up(self, limit: int) -> None:
        for stage, block, operator in self._rest():
            now = self.made[stage][block]
            more = Choice(False, now.keys | {operator.key}, now.bytes + operator.bytes, now.cost - operator.cost)
            if more.bytes < self.stages[stage][block].whole:
                self._take(stage, block, more, limit)

    def _held(self, stage: int) -> tuple[int, int]:
        """Return the bytes that a stage holds of one microbatch, and what its backward adds at most: before a block
        computes again what it has not held, the blocks behind it are freed."""
        behind = on_top = 0
        for profile, choice in zip(reversed(self.stages[stage]), reversed(self.made[stage]), strict=True):
            on_top = max(on_top, profile.whole - choice.bytes - behind)
            behind += profile.inputs + choice.bytes
        return behind, on_top

    def _take(self, stage: int, block: int, choice: Choice, limit: int) -> bool:
        before, self.made[stage][block] = self.made[stage][block], choice
        if self.peak <= limit:
            return True
        self.made[stage][block] = before
        return False

    def _steps(self) -> Iterator[tuple[int, int, Choice]]:
        """Return the steps of all blocks, the one that saves most per byte first; of equal ones, the last block's."""
        weights = [max(moment.in_flight[stage] for moment in self.moments) for stage in range(len(self.stages))]
        steps: list[tuple[float, int, int, Choice]] = []
        for stage, profiles in enumerate(self.stages):
            for block, profile in enumerate(profiles):
                before = self.made[stage][block]
                for choice in _hull(profile):
                    worth = (before.cost - choice.cost) / max(1, (choice.bytes - before.bytes) * weights[stage])
                    steps.append((worth, block, stage, choice))
                    before = choice
        # Steps of one block come with falling worth, and the sort is stable.
        steps.sort(key=lambda step: (-step[0], -step[1], step[2]))
        return ((stage, block, choice) for _, block, stage, choice in steps)

    def _rest(self) -> Iterator[tuple[int, int, Operator]]:
        """Return what blocks that are not whole do not hold, the operator that saves most per byte first."""
        rest = [
            (operator.cost / operator.bytes, block, stage, operator)
            for stage, profiles in enumerate(self.stages)
            for block, profile in enumerate(profiles)
            if not self.made[stage][block].whole
            for operator in profile.operators
            if operator.key not in self.made[stage][block].keys | self._released
        ]
        rest.sort(key=lambda each: (-each[0], -each[1], each[2]))
        return ((stage, block, operator) for _, block, stage, operator in rest)


def _hull(profile: Profile) -> list[Choice]:
    """Return what a block may hold, from inputs alone to everything, with falling worth of each further byte."""
    point = Choice(False, frozenset(), 0, profile.cost)
    hull = [point]
    for operator in sorted(profile.operators, key=lambda each: -each.cost / each.bytes):
        point = Choice(False, point.keys | {operator.key}, point.bytes + operator.bytes, point.cost - operator.cost)
        if point.bytes >= profile.whole:
            break
        hull.append(point)
    whole = Choice(True, frozenset(), profile.whole, 0.0)
    # Operators come by falling worth, so only the last point can lie above a line to another.
    while len(hull) > 1 and _slope(hull[-1], whole) > _slope(hull[-2], hull[-1]):
        hull.pop()
    return [*hull[1:], whole]


def _slope(first: Choice, second: Choice) -> float:
    return (first.cost - second.cost) / max(1, second.bytes - first.bytes)

"""Two runs' numbers, step by step: where each parts, in the order of cause, and whether rounding has grown so far.

[Note: rounding that grows] Sums in another order differ in the last bit. At the edge of stability that grows from step
to step, with all correct: 1e-7 to 1e-3 in twenty steps, where float64 agrees to 1e-16. So what matters is not how far
two runs are apart, but how they came there: from the size of a rounding, step by step, or at once. A jump is told even
where it is small: of a gradient that is wrong in one layer, the norm of all may hardly tell.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..base.errors import ConfigError
from ..events.step import StepResult
from .order import EPSILONS, TOLERANCES
from .record import Recorded, plain_of
from .start import relative

EXACT = 1e-9
"""Rates and counts follow from the step alone: more is a difference of what the runs were told."""
JUMP = 100.0
"""Times what two runs were apart before, or the dtype's rounding: more does not come by rounding in one step."""


@dataclass(frozen=True)
class Parted:
    """The first step in which one number of two runs differs beyond rounding.

    Attributes:
        name: of the number.
        step, one, other: which, and its values.
        before: the largest relative difference in the steps before.
        first: the first step in which they differ at all.
        is_jump: whether it came at once; see [Note: rounding that grows].
    """

    name: str
    step: int
    one: float | None
    other: float | None
    before: float
    first: int
    is_jump: bool

    @property
    def apart(self) -> float:
        return relative(self.one, self.other)

    def as_values(self) -> dict[str, Any]:
        return {**asdict(self), "apart": self.apart}


@dataclass(frozen=True)
class Course:
    """What two runs have in common.

    Attributes:
        steps: the first and the last that both have.
        parted: what differs beyond rounding, the earliest first, and of one step causes first.
        largest: of all relative differences, by the name of the number.
    """

    steps: tuple[int, int]
    parted: tuple[Parted, ...]
    largest: Mapping[str, float]


def course_of(one: Recorded, other: Recorded, *, rtol: float | None, precision: str) -> Course:
    """Compare the metrics of two runs.

    Args:
        rtol: within which losses, norms and sums are to agree, relatively; None: as their dtype lets one expect, and
            without jumps.
        precision: the coarser dtype of both.

    Raises:
        ConfigError: they have no step in common.
    """
    steps = sorted(one.results.keys() & other.results.keys())
    if not steps:
        raise ConfigError(
            f"{one.directory} has steps {min(one.results)} to {max(one.results)}, and {other.directory} "
            f"{min(other.results)} to {max(other.results)}: no step is in both."
        )
    numbers = {step: (_numbers(one.results[step]), _numbers(other.results[step])) for step in steps}
    names = dict.fromkeys(name for pair in numbers.values() for each in pair for name in each)
    tolerance = TOLERANCES[precision] if rtol is None else rtol
    found, largest = [], {}
    for name in names:
        pairs = {
            step: (a[name], b[name])
            for step, (a, b) in numbers.items()
            # What only one of both has measured, they do not differ in.
            if name in a and name in b
        }
        if not pairs:
            continue
        is_exact = name == "num_tokens" or name.startswith("learning_rate")
        apart = {step: _apart(name, *pair, one.results[step].num_tokens) for step, pair in pairs.items()}
        largest[name] = max(apart.values())
        jump = JUMP if rtol is None and not is_exact else None
        at = _first(apart, EXACT if is_exact else tolerance, EPSILONS[precision], jump)
        if at is not None:
            before = max((each for step, each in apart.items() if step < at), default=0.0)
            first = next(step for step, each in apart.items() if each > 0)
            is_jump = is_exact or apart[at] > JUMP * max(before, EPSILONS[precision])
            found.append(Parted(name, at, *pairs[at], before, first, is_jump))
    order = {name: place for place, name in enumerate(names)}
    found.sort(key=lambda each: (each.step, order[each.name]))
    return Course((steps[0], steps[-1]), tuple(found), largest)


def _numbers(result: StepResult) -> dict[str, float]:
    return {
        **plain_of(result),
        **{f"norm of {part}": value for part, value in result.norms.items()},
        **{f"evaluation {name}": value for name, value in result.evaluations.items()},
    }


def _apart(name: str, one: float, other: float, num_tokens: int) -> float:
    """Relatively; a sum over tokens may be next to nothing, and what it is made of is not."""
    if name.startswith("sum ") and math.isfinite(one) and math.isfinite(other):
        return abs(one - other) / max(abs(one), abs(other), num_tokens, 1)
    return relative(one, other)


def _first(apart: Mapping[int, float], tolerance: float, epsilon: float, jump: float | None) -> int | None:
    """The first step that is beyond the tolerance, or `jump` times as far apart as all before, or as a rounding."""
    before = epsilon
    for step, each in apart.items():
        if each > tolerance or (jump is not None and each > jump * before):
            return step
        before = max(before, each)
    return None

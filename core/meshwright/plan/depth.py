"""What a deep model holds, sends and takes, from models of fewer blocks that are otherwise the same.

Blocks are alike, so what a rank holds and sends grows by the same for each. Two depths tell by how much, and a third
whether it is so; where it is not (blocks differ), the model is traced at its full depth. So it is where another part of
the step would hold the most in a deep model than in shallow ones. Seconds, and what an allocator
reserves, grow by nearly the same: their line is taken through the deepest two, and not checked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

DEPTHS = ((2, 4, 6), (4, 6, 8), (6, 8, 10))
"""Blocks of the models that are traced, the last of each to check; even, since some models alternate. The next where
one does not tell: in a shallow model the peak may lie elsewhere."""
PEAK, PHASES = "peak_allocated_bytes", "peak_by_phase"
NEARLY = ("peak_reserved_bytes", "step_seconds", "busy_seconds")


def at_full_depth(found: Callable[[int], dict[str, Any]], layers: int) -> dict[str, Any] | None:
    """What `found` gives for `layers` blocks, as far as it follows from few.

    Args:
        found: numbers, texts, and mappings and lists of these, for so many blocks.

    Returns:
        None where it does not follow, or where few are not fewer.
    """
    known = functools.cache(found)
    for depths in DEPTHS:
        if layers <= sum(depths):
            return None
        exact, nearly = zip(*(_apart(known(depth)) for depth in depths), strict=True)
        if _between(exact[0], exact[1], depths[:2], depths[2]) == exact[2]:
            made: dict[str, Any] = _between(exact[0], exact[1], depths[:2], layers)
            if made[PEAK] != max(made[PHASES].values()):
                continue
            return made | {key: _near(nearly[1][key], nearly[2][key], depths[1:], layers) for key in nearly[0]}
    return None


def _apart(values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    return (
        {key: value for key, value in values.items() if key not in NEARLY},
        {key: value for key, value in values.items() if key in NEARLY},
    )


def _between(one: Any, other: Any, depths: tuple[int, ...], depth: int) -> Any:
    """The same values at another depth; None where they are not alike in kind."""
    if isinstance(one, bool | str) or isinstance(other, bool | str):
        return one if one == other else None
    if isinstance(one, int) and isinstance(other, int):
        steps, rest = divmod((other - one) * (depth - depths[0]), depths[1] - depths[0])
        return None if rest else one + steps
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return {key: _between(one[key], other[key], depths, depth) for key in one}
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [_between(*pair, depths, depth) for pair in zip(one, other, strict=True)]
    return None


def _near(one: Any, other: Any, depths: tuple[int, ...], depth: int) -> Any:
    if isinstance(one, dict):
        return {key: _near(value, other.get(key, 0.0), depths, depth) for key, value in one.items()}
    value = one + (other - one) * (depth - depths[0]) / (depths[1] - depths[0])
    return round(value) if isinstance(one, int) else value

"""Which ranks stand for all: of each axis the first and the last, and of a pipeline stages between, too."""

from __future__ import annotations

from collections.abc import Mapping

from ..mesh.sizes import ROOT_AXES, Degrees


def representatives(degrees: Degrees) -> list[int]:
    """Ranks, ascending, of which each other one is like some.

    Stages differ in what they hold, so the first two, the middle one and the last two are taken. Along the other axes
    ranks have equal parts, or the first has the most and the last the least.
    """
    last = {axis: getattr(degrees, axis) - 1 for axis in ROOT_AXES}
    stages = {stage for stage in (0, 1, degrees.pp // 2, degrees.pp - 2, degrees.pp - 1) if 0 <= stage < degrees.pp}
    found = {_rank({"pp": stage}, degrees) for stage in stages}
    return sorted({*found, _rank(last, degrees)})


def _rank(place: Mapping[str, int], degrees: Degrees) -> int:
    """The rank with these coordinates, 0 where none is given."""
    rank = 0
    for axis in ROOT_AXES:
        rank = rank * getattr(degrees, axis) + place.get(axis, 0)
    return rank

"""Decide which rank writes or sends a rectangle that several ranks hold.

A rectangle on several ranks is cut along its longest dim into as many parts as there are ranks, so that all write
alike; small ones go to the rank that has the least to write.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

SMALL_BYTES = 1 << 16
"""Rectangles below this are not cut: each costs a header in the file."""


class Rectangle(NamedTuple):
    """A rectangle of a named tensor: offsets and sizes in the full tensor, and bytes of an element."""

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    itemsize: int

    @property
    def nbytes(self) -> int:
        return self.itemsize * math.prod(self.sizes)


def divide(held: Sequence[Sequence[Rectangle]]) -> list[list[Rectangle]]:
    """Return for each rank the parts it writes; together, each element once.

    Args:
        held: rectangles of each rank; those of one tensor are equal on two ranks, or disjoint.
    """
    holders: dict[Rectangle, list[int]] = {}
    for rank, rectangles in enumerate(held):
        # A rank may hold a rectangle twice.
        for rectangle in dict.fromkeys(rectangles):
            holders.setdefault(rectangle, []).append(rank)
    owned: list[list[Rectangle]] = [[] for _ in held]
    written = [0] * len(held)
    small = []
    for rectangle, ranks in holders.items():
        if len(ranks) > 1 and rectangle.nbytes < SMALL_BYTES:
            small.append(rectangle)
            continue
        for rank, part in zip(ranks, _parts(rectangle, len(ranks)), strict=False):
            owned[rank].append(part)
            written[rank] += part.nbytes
    for rectangle in sorted(small, key=lambda each: -each.nbytes):
        rank = min(holders[rectangle], key=lambda each: written[each])
        owned[rank].append(rectangle)
        written[rank] += rectangle.nbytes
    return owned


def _parts(rectangle: Rectangle, count: int) -> Iterator[Rectangle]:
    """Yield up to `count` parts of about the same size."""
    if count == 1 or not rectangle.sizes:
        yield rectangle
        return
    dim = max(range(len(rectangle.sizes)), key=lambda each: rectangle.sizes[each])
    # Parts along the first dim are contiguous in memory.
    dim = 0 if rectangle.sizes[0] >= count else dim
    size = rectangle.sizes[dim]
    for index in range(count):
        start, end = size * index // count, size * (index + 1) // count
        if start < end:
            offsets, sizes = list(rectangle.offsets), list(rectangle.sizes)
            offsets[dim], sizes[dim] = offsets[dim] + start, end - start
            yield rectangle._replace(offsets=tuple(offsets), sizes=tuple(sizes))

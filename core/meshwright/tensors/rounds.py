"""Plan the rounds in which full tensors are gathered from the ranks' rectangles; names and numbers only.

In a round each rank fills its segment of a shared buffer. As many tensors as fit share a round; a larger tensor takes
several, each with the next stretch of every owner's elements. Segments are padded to one length, for an all-gather,
unless that doubles the traffic; else each is broadcast, as where one pipeline stage holds the tensor.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .ownership import Rectangle
from .pieces import stretch_rectangles


class Part(NamedTuple):
    """A rectangle of a tensor, and its bytes [begin, end) in a rank's segment."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Round:
    """What is sent at once.

    Attributes:
        names: tensors in it, in order.
        is_last: whether they are complete after it; else the only one takes more rounds.
        segments: of each rank, by tensor.
        starts: where each rank's segment begins in the buffer, and where the last one ends.
        is_gathered: whether all segments are equally long, for an all-gather.
    """

    names: tuple[str, ...]
    is_last: bool
    segments: Sequence[Mapping[str, Sequence[Part]]]
    starts: tuple[int, ...]
    is_gathered: bool

    @property
    def nbytes(self) -> int:
        """Size of the buffer."""
        return self.starts[-1]


def rounds(names: Sequence[str], owned: Sequence[Sequence[Rectangle]], bucket_bytes: int) -> Iterator[Round]:
    """Yield the rounds in which tensors are gathered.

    Args:
        names: of the tensors, in order; one that no rank gives anything of is empty, and still in a round.
        owned: what each rank sends; together, each element once.
        bucket_bytes: of the buffer, exceeded only to hold one element of each rank.
    """
    ranks = len(owned)
    given: dict[str, list[list[Rectangle]]] = {name: [[] for _ in range(ranks)] for name in names}
    for rank, rectangles in enumerate(owned):
        for each in rectangles:
            given[each.name][rank].append(each)
    window = _Segments(ranks)
    for name in names:
        if window.names and window.size_with(given[name]) > bucket_bytes:
            yield window.round(is_last=True)
            window = _Segments(ranks)
        if window.names or window.size_with(given[name]) <= bucket_bytes:
            window.add(name, given[name])
        else:
            yield from _of_one(name, given[name], bucket_bytes)
    if window.names:
        yield window.round(is_last=True)


def _of_one(name: str, given: Sequence[Sequence[Rectangle]], bucket_bytes: int) -> Iterator[Round]:
    """Yield the rounds of a tensor that does not fit into one."""
    counts = [sum(math.prod(each.sizes) for each in rectangles) for rectangles in given]
    is_gathered = _is_gathered(counts)
    width = len(given) if is_gathered else sum(count > 0 for count in counts)
    itemsize = next(each.itemsize for rectangles in given for each in rectangles)
    most = max(1, bucket_bytes // (width * itemsize))
    for begin in range(0, max(counts), most):
        segments = _Segments(len(given))
        segments.add(name, [list(_stretch(rectangles, begin, begin + most)) for rectangles in given])
        yield segments.round(is_last=begin + most >= max(counts), is_gathered=is_gathered)


def _stretch(rectangles: Sequence[Rectangle], begin: int, end: int) -> Iterator[Rectangle]:
    """Yield elements [begin, end) of rectangles that are flattened and concatenated."""
    before = 0
    for each in rectangles:
        count = math.prod(each.sizes)
        first, last = max(begin - before, 0), min(end - before, count)
        for _, offsets, sizes in stretch_rectangles(first, last, each.sizes):
            placed = tuple(a + b for a, b in zip(each.offsets, offsets, strict=True))
            yield each._replace(offsets=placed, sizes=sizes)
        before += count


class _Segments:
    def __init__(self, ranks: int) -> None:
        self.names: list[str] = []
        self._parts: list[dict[str, list[Part]]] = [{} for _ in range(ranks)]
        self._ends = [0] * ranks
        self._itemsize = 1

    def add(self, name: str, given: Sequence[Sequence[Rectangle]]) -> None:
        self.names.append(name)
        for rank, rectangles in enumerate(given):
            for each in rectangles:
                begin = _up(self._ends[rank], each.itemsize)
                self._ends[rank] = begin + each.nbytes
                self._itemsize = max(self._itemsize, each.itemsize)
                self._parts[rank].setdefault(name, []).append(Part(each.offsets, each.sizes, begin, self._ends[rank]))

    def size_with(self, given: Sequence[Sequence[Rectangle]]) -> int:
        """Return the size of the buffer if another tensor is added."""
        ends, itemsize = list(self._ends), self._itemsize
        for rank, rectangles in enumerate(given):
            for each in rectangles:
                ends[rank] = _up(ends[rank], each.itemsize) + each.nbytes
                itemsize = max(itemsize, each.itemsize)
        lengths = [_up(end, itemsize) for end in ends]
        return len(lengths) * max(lengths) if _is_gathered(lengths) else sum(lengths)

    def round(self, *, is_last: bool, is_gathered: bool | None = None) -> Round:
        # Whatever their order, elements of any of the tensors may begin where a segment does.
        lengths = [_up(end, self._itemsize) for end in self._ends]
        is_gathered = _is_gathered(lengths) if is_gathered is None else is_gathered
        if is_gathered:
            lengths = [max(lengths)] * len(lengths)
        starts = tuple(itertools.accumulate(lengths, initial=0))
        return Round(tuple(self.names), is_last, self._parts, starts, is_gathered)


def _is_gathered(lengths: Sequence[int]) -> bool:
    return len(lengths) * max(lengths) < 2 * sum(lengths)


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple

"""Chunks (rectangles) of full tensors: those of this rank, and which rank writes or sends a chunk of several ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from .._compat.torch import is_sharded


@dataclass(frozen=True, eq=False)
class LocalChunk:
    """A rectangle of a full tensor: its offsets, and a writable view of this rank's memory."""

    offsets: tuple[int, ...]
    tensor: Tensor

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)


@dataclass(frozen=True, eq=False)
class ChunkedTensor:
    """A tensor of which this rank has some chunks or none: full shape, dtype, and chunks, which may overlap."""

    shape: torch.Size
    dtype: torch.dtype
    chunks: tuple[LocalChunk, ...]

    def find_view(self, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor | None:
        """Return a rectangle of the full tensor as a view of the chunk that contains it; None if none does."""
        for chunk in self.chunks:
            starts = [a - b for a, b in zip(offsets, chunk.offsets, strict=True)]
            ends = [start + size for start, size in zip(starts, sizes, strict=True)]
            if all(start >= 0 for start in starts) and all(e <= s for e, s in zip(ends, chunk.sizes, strict=True)):
                part = tuple(slice(start, end) for start, end in zip(starts, ends, strict=True))
                return chunk.tensor[part].detach()
        return None


def get_local_chunks(tensor: Tensor) -> list[LocalChunk]:
    """Return this rank's chunks of a tensor: at most one of a plain tensor, any number of a DTensor."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return [LocalChunk((0,) * tensor.dim(), tensor)] if tensor.numel() else []
    local = tensor.to_local()
    return to_global_chunks([LocalChunk((0,) * local.dim(), local)], tensor)


def to_slices(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))


def get_flat_range_chunks(flat: Tensor, start: int, shape: Sequence[int]) -> list[LocalChunk]:
    """Return the chunks, at most 2 x dims - 1, that a range of a flattened tensor covers.

    Args:
        flat: view of this rank's memory, 1-D: the elements of the range.
        start: index of its first element in the flattened tensor.
        shape: shape of the full tensor.
    """
    return [
        LocalChunk(offsets, flat.detach()[begin - start : begin - start + math.prod(sizes)].view(sizes))
        for begin, offsets, sizes in split_flat_range(start, start + flat.numel(), tuple(shape))
    ]


def to_global_chunks(chunks: Iterable[LocalChunk], shard: DTensor) -> list[LocalChunk]:
    """Convert chunks of this rank's local tensor of `shard` to chunks of the full tensor."""
    ranges = [_find_index_ranges(shard, dim) for dim in range(shard.dim())]
    return [
        part for chunk in chunks for rectangle in itertools.product(*ranges) for part in _intersect(chunk, rectangle)
    ]


def _intersect(piece: LocalChunk, rectangle: Sequence[_IndexRange]) -> Iterator[LocalChunk]:
    offsets, slices = [], []
    for start, size, run in zip(piece.offsets, piece.sizes, rectangle, strict=True):
        first, last = max(start, run.local_start), min(start + size, run.local_start + run.length)
        if first >= last:
            return
        offsets.append(run.start + first - run.local_start)
        slices.append(slice(first - start, last - start))
    yield LocalChunk(tuple(offsets), piece.tensor[tuple(slices)])


@dataclass(frozen=True)
class _IndexRange:
    """`length` consecutive indices along one dim, from `start` in the full tensor and `local_start` in the shard."""

    start: int
    local_start: int
    length: int


_index_range_cache: dict[tuple[Any, ...], tuple[_IndexRange, ...]] = {}


def _find_index_ranges(tensor: DTensor, dim: int) -> tuple[_IndexRange, ...]:
    mesh, size = tensor.device_mesh, tensor.shape[dim]
    along = tuple(
        placement if is_sharded(placement) and placement.dim == dim else Replicate() for placement in tensor.placements
    )
    if all(placement.is_replicate() for placement in along):
        return (_IndexRange(0, 0, size),) if size else ()
    key = (tuple(mesh.shape), tuple(mesh.get_coordinate() or ()), along, size)
    if key not in _index_range_cache:
        # Let torch shard the indices as it has sharded the tensor, for any kind of placement.
        shape = [size if each == dim else 1 for each in range(tensor.dim())]
        indices = torch.arange(size).view(shape)
        mine = distribute_tensor(indices, mesh, along, src_data_rank=None).to_local().flatten().tolist()
        _index_range_cache[key] = _group_consecutive(mine)
    return _index_range_cache[key]


def _group_consecutive(indices: Sequence[int]) -> tuple[_IndexRange, ...]:
    runs: list[_IndexRange] = []
    for place, index in enumerate(indices):
        if runs and index == runs[-1].start + runs[-1].length:
            runs[-1] = _IndexRange(runs[-1].start, runs[-1].local_start, runs[-1].length + 1)
        else:
            runs.append(_IndexRange(index, place, 1))
    return tuple(runs)


def split_flat_range(
    start: int, end: int, shape: tuple[int, ...]
) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Yield first element, offsets and sizes of the rectangles of elements [start, end) of a flattened tensor."""
    if start >= end:
        return
    if len(shape) <= 1:
        yield start, (start,) if shape else (), (end - start,) if shape else ()
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), end // row
    # Either within one row; or the end of a row, full rows, and the start of a row.
    bounds = (start, end) if first > last else (start, first * row, last * row, end)
    for begin, stop in itertools.pairwise(bounds):
        index, before = begin // row, begin // row * row
        if begin == before and stop - begin >= row:
            yield begin, (index, *(0 for _ in shape[1:])), ((stop - begin) // row, *shape[1:])
            continue
        for at, offsets, sizes in split_flat_range(begin - before, stop - before, shape[1:]):
            yield before + at, (index, *offsets), (1, *sizes)


# -- who writes or sends a rectangle

MIN_SPLIT_BYTES = 1 << 16
"""Smaller rectangles are not split, since each part needs a header in the file [bytes]."""


class Rectangle(NamedTuple):
    """A rectangle of a named tensor: offsets and sizes in the full tensor, and bytes per element."""

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    itemsize: int

    @property
    def nbytes(self) -> int:
        return self.itemsize * math.prod(self.sizes)


def assign_owners(rectangles_by_rank: Sequence[Sequence[Rectangle]]) -> list[list[Rectangle]]:
    """Return the rectangles that each rank writes; each element is written once.

    A rectangle that several ranks have is split along one dim into as many parts, so that ranks write equal amounts. A
    small one goes to the rank with the least to write. Rectangles of one tensor must be equal on two ranks, or
    disjoint.
    """
    holders: dict[Rectangle, list[int]] = {}
    for rank, rectangles in enumerate(rectangles_by_rank):
        # A rank may have a rectangle twice.
        for rectangle in dict.fromkeys(rectangles):
            holders.setdefault(rectangle, []).append(rank)
    owned: list[list[Rectangle]] = [[] for _ in rectangles_by_rank]
    written = [0] * len(rectangles_by_rank)
    small = []
    for rectangle, ranks in holders.items():
        if len(ranks) > 1 and rectangle.nbytes < MIN_SPLIT_BYTES:
            small.append(rectangle)
            continue
        for rank, part in zip(ranks, _split_rectangle(rectangle, len(ranks)), strict=False):
            owned[rank].append(part)
            written[rank] += part.nbytes
    for rectangle in sorted(small, key=lambda each: -each.nbytes):
        rank = min(holders[rectangle], key=lambda each: written[each])
        owned[rank].append(rectangle)
        written[rank] += rectangle.nbytes
    return owned


def _split_rectangle(rectangle: Rectangle, count: int) -> Iterator[Rectangle]:
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

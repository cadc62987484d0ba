"""Sample a random tensor in tiles, each from its own stream, so that any part can be sampled separately.

[Note: tiles] A tensor is treated as a matrix: the last dim is the columns, all others form the rows. It is cut into
tiles of 128 x 512 elements (or as many in another shape, if it is narrower or has one dim). The random operators that
fill it run on one tile at a time, each with a generator seeded for the tile and the operator. So a value depends on the
seed, the operator's number and the value's position in the tensor. It does not depend on which other values are
sampled, by which rank, or on how many threads. Only the tiles at the edges of a part sample more values than needed.

[Note: streams] Tiles of all operators of a model are numbered consecutively. torch seeds its CPU generator, a Mersenne
Twister, with 32 bits, so hashes of (seed, operator, tile) would collide after some 65,000 tiles. Consecutive numbers do
not; a bijective 32-bit mixing function spreads them. A model may have 2**32 tiles, 2.8e14 values. torch has no
counter-based generator (Philox) on a CPU, and numpy's may change between versions. Source: the finalizer of MurmurHash3
(Austin Appleby, public domain).
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

TILE_ELEMENTS = 1 << 16
TILE_COLUMNS = 1 << 9
_BITS = (1 << 32) - 1


@dataclass(frozen=True)
class TileGrid:
    """The division of a tensor into tiles; see [Note: tiles]."""

    rows: int
    columns: int
    tile_rows: int
    tile_columns: int

    @classmethod
    def from_shape(cls, shape: Sequence[int]) -> TileGrid:
        rows, columns = math.prod(shape[:-1]), shape[-1] if shape else 1
        tile_columns = max(1, min(columns, TILE_ELEMENTS if rows == 1 else TILE_COLUMNS))
        return cls(rows, columns, max(1, TILE_ELEMENTS // tile_columns), tile_columns)

    @property
    def num_tiles(self) -> int:
        return -(-self.rows // self.tile_rows) * -(-self.columns // self.tile_columns)

    def iter_tiles(self, rows: slice, columns: slice) -> Iterator[Tile]:
        """Yield the tiles that overlap these rows and columns."""
        tiles_per_row = -(-self.columns // self.tile_columns)
        for row in range(rows.start // self.tile_rows, -(-rows.stop // self.tile_rows)):
            for column in range(columns.start // self.tile_columns, -(-columns.stop // self.tile_columns)):
                top, left = row * self.tile_rows, column * self.tile_columns
                bottom, right = min(top + self.tile_rows, self.rows), min(left + self.tile_columns, self.columns)
                yield Tile(row * tiles_per_row + column, slice(top, bottom), slice(left, right))


@dataclass(frozen=True)
class Tile:
    index: int
    rows: slice
    columns: slice


@dataclass(frozen=True)
class FillOp:
    """An elementwise in-place operator. `args` and `kwargs` follow the tensor."""

    operator: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    first_tile: int | None = None
    """Number of its first tile, if it samples random numbers."""
    rows: slice | None = None
    """Rows of the tensor that it fills; None: all."""


@dataclass(frozen=True)
class FillRecipe:
    """The fills that produce a tensor's values, in order; the first writes every element."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    fills: tuple[FillOp, ...]
    seed: int

    def read(self, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        grid = TileGrid.from_shape(self.shape)
        columns = slice(offsets[-1], offsets[-1] + sizes[-1]) if self.shape else slice(0, 1)
        result = torch.empty(tuple(sizes), dtype=self.dtype)
        if not result.numel():
            return result
        flat = result.view(-1, columns.stop - columns.start)
        jobs, num_rows = [], 0
        for rows in _iter_row_ranges(self.shape, offsets, sizes):
            jobs += [(tile, rows, num_rows) for tile in grid.iter_tiles(rows, columns)]
            num_rows += rows.stop - rows.start

        def sample(job: tuple[Tile, slice, int]) -> None:
            tile, rows, first_row = job
            top, bottom = max(tile.rows.start, rows.start), min(tile.rows.stop, rows.stop)
            left, right = max(tile.columns.start, columns.start), min(tile.columns.stop, columns.stop)
            tile_top, tile_left = tile.rows.start, tile.columns.start
            begin, values = first_row + top - rows.start, self._draw_tile(tile)[top - tile_top : bottom - tile_top]
            target = flat[begin : begin + bottom - top, left - columns.start : right - columns.start]
            target.copy_(values[:, left - tile_left : right - tile_left])

        # Use as many threads as torch, which releases the GIL while an operator runs.
        threads = min(torch.get_num_threads(), len(jobs))
        with ThreadPoolExecutor(threads) if threads > 1 else nullcontext() as workers:
            deque(map(sample, jobs) if workers is None else workers.map(sample, jobs), maxlen=0)
        return result

    def _draw_tile(self, tile: Tile) -> Tensor:
        shape = tile.rows.stop - tile.rows.start, tile.columns.stop - tile.columns.start
        values = torch.empty(shape, dtype=self.dtype)
        for fill in self.fills:
            target = values
            if fill.rows is not None:
                begin, end = (min(max(row - tile.rows.start, 0), shape[0]) for row in (fill.rows.start, fill.rows.stop))
                target = values[begin:end]
            if fill.first_tile is None:
                fill.operator(target, *fill.args, **fill.kwargs)
            else:
                generator = _make_generator(self.seed, fill.first_tile + tile.index)
                fill.operator(target, *fill.args, **{**fill.kwargs, "generator": generator})
        return values


def _iter_row_ranges(shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[slice]:
    """Yield the matrix rows that a rectangle of the tensor covers, in the rectangle's order."""
    if len(shape) <= 2:
        yield slice(offsets[0], offsets[0] + sizes[0]) if len(shape) == 2 else slice(0, 1)
        return
    inner = math.prod(shape[1:-1])
    first, last = 0, 0
    for index in range(offsets[0], offsets[0] + sizes[0]):
        for rows in _iter_row_ranges(shape[1:], offsets[1:], sizes[1:]):
            begin, end = index * inner + rows.start, index * inner + rows.stop
            if begin != last and first < last:
                yield slice(first, last)
            first, last = first if begin == last else begin, end
    if first < last:
        yield slice(first, last)


def _make_generator(seed: int, stream: int) -> torch.Generator:
    """Return a generator at the start of a stream; see [Note: streams]."""
    base = int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=4).digest())
    return torch.Generator().manual_seed(_mix_bits((base + stream) & _BITS))


def _mix_bits(value: int) -> int:
    """Mix 32 bits bijectively."""
    value = ((value ^ (value >> 16)) * 0x85EBCA6B) & _BITS
    value = ((value ^ (value >> 13)) * 0xC2B2AE35) & _BITS
    return value ^ (value >> 16)

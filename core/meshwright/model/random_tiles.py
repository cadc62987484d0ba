"""Draw a random tensor in tiles, each from a stream of its own, so that any part of it can be drawn alone.

[Note: tiles] A tensor is a matrix here: its last dim, and all others together. It is cut into tiles of 128 x 512
elements (or as many in another form, where it is narrower, or has one dim). The random operators that fill it run on
one tile at a time, each with a generator that is seeded for the tile and the operator. So a value depends on the seed,
the operator's number and its place in the tensor, and not on which other values are drawn, by whom, and on how many
threads. Only within the tiles at the edges of a part is too much drawn.

[Note: streams] Tiles of all operators of a model are numbered consecutively. torch seeds its CPU generator, a Mersenne
Twister, with 32 bits, so hashes of (seed, operator, tile) would collide after some 65,000 tiles. Consecutive numbers do
not; a bijective mixing function of 32 bits spreads them. A model may have 2**32 tiles, 2.8e14 values. torch has no
counter-based generator (Philox) on a CPU, and numpy's may change between versions.
Source: the finalizer of MurmurHash3 (Austin Appleby, public domain).
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
    """How a tensor is cut into tiles; see [Note: tiles]."""

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
        """Yield the tiles that have elements in these rows and columns."""
        across = -(-self.columns // self.tile_columns)
        for row in range(rows.start // self.tile_rows, -(-rows.stop // self.tile_rows)):
            for column in range(columns.start // self.tile_columns, -(-columns.stop // self.tile_columns)):
                top, left = row * self.tile_rows, column * self.tile_columns
                bottom, right = min(top + self.tile_rows, self.rows), min(left + self.tile_columns, self.columns)
                yield Tile(row * across + column, slice(top, bottom), slice(left, right))


@dataclass(frozen=True)
class Tile:
    index: int
    rows: slice
    columns: slice


@dataclass(frozen=True)
class FillOp:
    """An operator that writes into a tensor, element by element; `args` and `kwargs` follow the tensor."""

    operator: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    first_tile: int | None = None
    """Number of its first tile, if it draws random numbers."""
    rows: slice | None = None
    """Rows of the tensor that it writes; None: all."""


@dataclass(frozen=True)
class FillRecipe:
    """Fills that give a tensor its values, one after the other; the first writes every element. The seed is global."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    fills: tuple[FillOp, ...]
    seed: int

    def read(self, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        grid = TileGrid.from_shape(self.shape)
        columns = slice(offsets[-1], offsets[-1] + sizes[-1]) if self.shape else slice(0, 1)
        found = torch.empty(tuple(sizes), dtype=self.dtype)
        if not found.numel():
            return found
        flat = found.view(-1, columns.stop - columns.start)
        jobs, done = [], 0
        for rows in _iter_row_ranges(self.shape, offsets, sizes):
            jobs += [(tile, rows, done) for tile in grid.iter_tiles(rows, columns)]
            done += rows.stop - rows.start

        def draw(job: tuple[Tile, slice, int]) -> None:
            tile, rows, before = job
            top, bottom = max(tile.rows.start, rows.start), min(tile.rows.stop, rows.stop)
            left, right = max(tile.columns.start, columns.start), min(tile.columns.stop, columns.stop)
            down, across = tile.rows.start, tile.columns.start
            begin, drawn = before + top - rows.start, self._draw_tile(tile)[top - down : bottom - down]
            target = flat[begin : begin + bottom - top, left - columns.start : right - columns.start]
            target.copy_(drawn[:, left - across : right - across])

        # On as many threads as torch has; torch releases Python's lock while an operator runs.
        threads = min(torch.get_num_threads(), len(jobs))
        with ThreadPoolExecutor(threads) if threads > 1 else nullcontext() as workers:
            deque(map(draw, jobs) if workers is None else workers.map(draw, jobs), maxlen=0)
        return found

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
    """Yield the rows of the matrix that a rectangle of the tensor covers, in the rectangle's order."""
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
    """Return a generator at the beginning of a stream; see [Note: streams]."""
    base = int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=4).digest())
    return torch.Generator().manual_seed(_mix_bits((base + stream) & _BITS))


def _mix_bits(value: int) -> int:
    """Map 32 bits onto 32 bits, one to one."""
    value = ((value ^ (value >> 16)) * 0x85EBCA6B) & _BITS
    value = ((value ^ (value >> 13)) * 0xC2B2AE35) & _BITS
    return value ^ (value >> 16)

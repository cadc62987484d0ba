"""Which tensors a checkpoint holds, and where the bytes of each of their rectangles lie.

`index.json` is data alone: {"files": names, "tensors": {name: {"shape", "dtype", "pieces"}}}. The pieces of a tensor
are one list of integers, which has for each rectangle of the whole: the number of its file, its first byte there, its
offsets, its sizes. The bytes are those of the elements in row-major order, little-endian, with nothing between them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..tensors.ownership import Rectangle
from ..tensors.state import TensorKind
from .manifest import PAYLOAD, broken
from .places import Where

INDEX = "index.json"
_MOST_DIVIDED = 8
"""Dims along which a tensor can be in pieces; parallelism divides two."""


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor in a checkpoint.

    Attributes:
        shape: of the whole.
        dtype: of its elements.
        pieces: int64, (number of pieces, 2 + 2 x dims): file number, first byte, offsets, sizes.
    """

    shape: torch.Size
    dtype: torch.dtype
    pieces: np.ndarray

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def meeting(self, offsets: Sequence[int], sizes: Sequence[int]) -> list[StoredPiece]:
        """The stored rectangles that share elements with another."""
        starts, lengths = self._rectangles()
        wanted = np.array(offsets, np.int64)
        first = np.maximum(starts, wanted)
        last = np.minimum(starts + lengths, wanted + np.array(sizes, np.int64))
        return [
            StoredPiece(
                int(self.pieces[row, 0]),
                int(self.pieces[row, 1]),
                tuple(starts[row].tolist()),
                tuple(lengths[row].tolist()),
            )
            for row in np.flatnonzero((first < last).all(axis=1))
        ]

    def problem(self, sizes: Sequence[int]) -> str | None:
        """What is wrong with the pieces; None if they have each element of the tensor once, in files of so many bytes.

        Args:
            sizes: of the files, by number.
        """
        starts, lengths = self._rectangles()
        if min(self.shape, default=0) < 0 or self.nbytes >= 1 << 62:
            return f"is said to have the shape {list(self.shape)}"
        if (lengths <= 0).any() or (starts < 0).any() or (starts + lengths > np.array(self.shape, np.int64)).any():
            return "has pieces that are not within it"
        elements = lengths.prod(axis=1)
        if elements.sum() != math.prod(self.shape):
            return f"has {elements.sum()} of its {math.prod(self.shape)} elements"
        divided = np.flatnonzero((lengths != np.array(self.shape, np.int64)).any(axis=0))
        if divided.size > _MOST_DIVIDED:
            return f"is divided along {divided.size} dims, of which at most {_MOST_DIVIDED} can be"
        if elements.size > 1 and not _covers(starts[:, divided], lengths[:, divided], np.array(self.shape)[divided]):
            return "has pieces that overlap, and elements that are in none"
        if not elements.size:
            return None
        numbers, begins = self.pieces[:, 0], self.pieces[:, 1]
        if numbers.min() < 0 or numbers.max() >= len(sizes):
            return f"is said to be in another file than the {len(sizes)} that there are"
        if (begins < 0).any() or (begins > np.array(sizes)[numbers] - elements * self.dtype.itemsize).any():
            return "is said to be beyond the end of its file"
        return None

    def _rectangles(self) -> tuple[np.ndarray, np.ndarray]:
        dims = len(self.shape)
        return self.pieces[:, 2 : 2 + dims], self.pieces[:, 2 + dims :]


@dataclass(frozen=True)
class StoredPiece:
    """A rectangle of a tensor in a checkpoint: the number of its file, its first byte, its place in the whole."""

    file: int
    begin: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Index:
    """All tensors of a checkpoint by name, and the names of the files that their pieces give the numbers of."""

    files: tuple[str, ...]
    tensors: dict[str, StoredTensor]

    @property
    def kinds(self) -> dict[str, TensorKind]:
        """Shape and dtype of each tensor."""
        return {name: (each.shape, each.dtype) for name, each in self.tensors.items()}


def payload_name(rank: int) -> str:
    """The file that holds what a rank has written."""
    return f"{PAYLOAD}{rank:05d}.bin"


def written_index(owned: Sequence[Sequence[Rectangle]], kinds: Mapping[str, tuple[Sequence[int], str]]) -> bytes:
    """The contents of `index.json`.

    Args:
        owned: what each rank writes, in the order in which it does.
        kinds: shape and dtype of each tensor.
    """
    pieces: dict[str, list[int]] = {name: [] for name in kinds}
    for rank, rectangles in enumerate(owned):
        begin = 0
        for each in rectangles:
            pieces[each.name] += (rank, begin, *each.offsets, *each.sizes)
            begin += each.nbytes
    tensors = {name: {"shape": shape, "dtype": dtype, "pieces": pieces[name]} for name, (shape, dtype) in kinds.items()}
    content = {"files": [payload_name(rank) for rank in range(len(owned))], "tensors": tensors}
    return json.dumps(content, separators=(",", ":")).encode()


def check_tensors(directory: Where, tensors: Mapping[str, StoredTensor], sizes: Sequence[int]) -> None:
    """Refuse an index whose pieces are not parts of its tensors and files; see `StoredTensor.problem`.

    Raises:
        CheckpointError: names the tensor.
    """
    for name, each in tensors.items():
        problem = each.problem(sizes)
        if problem is not None:
            raise broken(directory, f"{name} {problem}")
    nbytes = sum(each.nbytes for each in tensors.values())
    if nbytes > sum(sizes):
        raise broken(directory, f"its tensors are said to have {nbytes} bytes, and its files have {sum(sizes)}")


def _covers(starts: np.ndarray, lengths: np.ndarray, shape: np.ndarray) -> bool:
    """Whether rectangles within a whole, with as many elements in all, have each of its elements once.

    [Note: corners] Modulo 2, how many rectangles an element is in follows from their corners alone: a corner at which
    an even number of them meet changes nothing. So if all corners but those of the whole occur an even number of times,
    each element is in an odd number of rectangles; as there are no more elements than in the whole, in one.

    Args:
        starts, lengths: int64, (number of rectangles, dims).
        shape: of the whole, (dims).
    """
    dims = shape.size
    corners = np.array(np.meshgrid(*[(0, 1)] * dims, indexing="ij"), np.int64).reshape(dims, -1).T
    of_pieces = (starts[:, None] + corners * lengths[:, None]).reshape(-1, dims)
    found, counts = np.unique(of_pieces, axis=0, return_counts=True)
    odd = found[counts % 2 == 1]
    return len(odd) == len(corners) and bool((odd == np.unique(corners * shape, axis=0)).all())


def dtype_name(dtype: torch.dtype) -> str:
    """As it is written: "float32"."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: Any) -> torch.dtype:
    """The reverse of `dtype_name`.

    Raises:
        ValueError: torch has no such dtype.
    """
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype of torch")
    return dtype

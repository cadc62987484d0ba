"""The tensors of a checkpoint: where the bytes of their pieces are, written in sequence and read into any pieces.

`index.json` is {"files": names, "tensors": {name: {"shape", "dtype", "pieces"}}}. The pieces of a tensor are one list
of integers: for each rectangle its file number, its first byte, its offsets and its sizes. The bytes are those of the
elements in row-major order, little-endian, without gaps.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from ..base.errors import CheckpointError
from ..tensors.chunks import ChunkedTensor, LocalChunk, Rectangle
from ..tensors.state import TensorMeta
from .lifecycle import CheckpointWriter
from .manifest import TENSORS_PREFIX, Manifest, StoredFile, incomplete_error, open_verified, read_verified_file
from .remote_storage import open_storage
from .storage import StorageLike, StorageReader

INDEX_FILE = "index.json"
"""Name of the file that says where each tensor of a checkpoint is stored."""
_MAX_SHARDED_DIMS = 8
"""Dims along which a tensor can be in pieces; parallelism divides two."""


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A full tensor in a checkpoint; `pieces` are int64, (number of pieces, 2 + 2 x dims), see above."""

    shape: torch.Size
    dtype: torch.dtype
    chunks: np.ndarray

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def intersect(self, piece: LocalChunk) -> list[_ChunkRead]:
        """Return what stored rectangles have of a piece."""
        starts, lengths = self._get_rectangles()
        wanted = np.array(piece.offsets, np.int64)
        first = np.maximum(starts, wanted)
        last = np.minimum(starts + lengths, wanted + np.array(piece.sizes, np.int64))
        return [
            _ChunkRead(
                StoredChunk(int(file), int(begin), tuple(starts[row].tolist()), tuple(lengths[row].tolist())),
                self.dtype,
                piece,
                tuple(first[row].tolist()),
                tuple((last - first)[row].tolist()),
            )
            for row in np.flatnonzero((first < last).all(axis=1))
            for file, begin in [self.chunks[row, :2]]
        ]

    def find_error(self, file_sizes: Sequence[int]) -> str | None:
        """Say what is wrong with the pieces; None if they hold each element once, within files of these sizes."""
        starts, lengths = self._get_rectangles()
        if min(self.shape, default=0) < 0 or self.nbytes >= 1 << 62:
            return f"is said to have the shape {list(self.shape)}"
        if (lengths <= 0).any() or (starts < 0).any() or (starts + lengths > np.array(self.shape, np.int64)).any():
            return "has pieces that are not within it"
        elements = lengths.prod(axis=1)
        if elements.sum() != math.prod(self.shape):
            return f"has {elements.sum()} of its {math.prod(self.shape)} elements"
        divided = np.flatnonzero((lengths != np.array(self.shape, np.int64)).any(axis=0))
        if divided.size > _MAX_SHARDED_DIMS:
            return f"is divided along {divided.size} dims, of which at most {_MAX_SHARDED_DIMS} can be"
        if elements.size > 1 and not _is_exact_cover(
            starts[:, divided], lengths[:, divided], np.array(self.shape)[divided]
        ):
            return "has pieces that overlap, and elements that are in none"
        if not elements.size:
            return None
        numbers, begins = self.chunks[:, 0], self.chunks[:, 1]
        if numbers.min() < 0 or numbers.max() >= len(file_sizes):
            return f"is said to be in another file than the {len(file_sizes)} that there are"
        if (begins < 0).any() or (begins > np.array(file_sizes)[numbers] - elements * self.dtype.itemsize).any():
            return "is said to be beyond the end of its file"
        return None

    def _get_rectangles(self) -> tuple[np.ndarray, np.ndarray]:
        dims = len(self.shape)
        return self.chunks[:, 2 : 2 + dims], self.chunks[:, 2 + dims :]


@dataclass(frozen=True)
class StoredChunk:
    """A rectangle of a tensor in a checkpoint: its file number, its first byte, its offsets and sizes."""

    file: int
    first_byte: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Index:
    """All tensors of a checkpoint by name, and the names of its files by number."""

    files: tuple[str, ...]
    tensors: dict[str, StoredTensor]

    @property
    def metas(self) -> dict[str, TensorMeta]:
        return {name: (each.shape, each.dtype) for name, each in self.tensors.items()}


def tensors_file_name(rank: int) -> str:
    """Return the name of the file with the tensors that a rank writes."""
    return f"{TENSORS_PREFIX}{rank:05d}.bin"


def build_index(
    rectangles_by_rank: Sequence[Sequence[Rectangle]], metas: Mapping[str, tuple[Sequence[int], str]]
) -> bytes:
    """Return the contents of `index.json` for the rectangles that each rank writes, in that order."""
    pieces: dict[str, list[int]] = {name: [] for name in metas}
    for rank, rectangles in enumerate(rectangles_by_rank):
        begin = 0
        for each in rectangles:
            pieces[each.name] += (rank, begin, *each.offsets, *each.sizes)
            begin += each.nbytes
    tensors = {name: {"shape": shape, "dtype": dtype, "pieces": pieces[name]} for name, (shape, dtype) in metas.items()}
    content = {"files": [tensors_file_name(rank) for rank in range(len(rectangles_by_rank))], "tensors": tensors}
    return json.dumps(content, separators=(",", ":")).encode()


def read_index(checkpoint: StorageLike, manifest: Manifest) -> Index:
    """Read the index of a checkpoint, and check that its pieces fit its tensors and files. Raises CheckpointError."""
    try:
        content = json.loads(read_verified_file(checkpoint, manifest, INDEX_FILE))
        files = tuple(str(name) for name in content["files"])
        tensors = {name: _parse_tensor(each) for name, each in content["tensors"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise incomplete_error(checkpoint, f"{INDEX_FILE} is no index ({type(error).__name__}: {error})") from None
    absent = StoredFile(0, "")
    sizes = [manifest.files.get(name, absent).size for name in files]
    for name, each in tensors.items():
        problem = each.find_error(sizes)
        if problem is not None:
            raise incomplete_error(checkpoint, f"{name} {problem}")
    nbytes = sum(each.nbytes for each in tensors.values())
    if nbytes > sum(sizes):
        raise incomplete_error(
            checkpoint, f"its tensors are said to have {nbytes} bytes, and its files have {sum(sizes)}"
        )
    return Index(files, tensors)


def _parse_tensor(content: Mapping[str, Any]) -> StoredTensor:
    shape = torch.Size(content["shape"])
    pieces = np.array(content["pieces"], np.int64).reshape(-1, 2 + 2 * len(shape))
    return StoredTensor(shape, parse_stored_dtype(content["dtype"]), pieces)


def _is_exact_cover(starts: np.ndarray, lengths: np.ndarray, shape: np.ndarray) -> bool:
    """Return whether rectangles hold each element of a tensor once, given that they have as many elements as it has.

    [Note: corners] The parity of the number of rectangles at each element follows from their corners alone: corners
    where an even number of rectangles meet cancel. If only the corners of the tensor remain, each element is in an odd
    number of rectangles, and since they have no more elements than the tensor, in exactly one.

    `starts` and `lengths` are int64, (number of rectangles, dims).
    """
    dims = shape.size
    corners = np.array(np.meshgrid(*[(0, 1)] * dims, indexing="ij"), np.int64).reshape(dims, -1).T
    of_pieces = (starts[:, None] + corners * lengths[:, None]).reshape(-1, dims)
    found, counts = np.unique(of_pieces, axis=0, return_counts=True)
    odd = found[counts % 2 == 1]
    return len(odd) == len(corners) and bool((odd == np.unique(corners * shape, axis=0)).all())


def format_dtype(dtype: torch.dtype) -> str:
    """Return the name that files use, such as "float32"."""
    return str(dtype).removeprefix("torch.")


def parse_stored_dtype(name: Any) -> torch.dtype:
    """Return the dtype of a name that files use. Raises ValueError if there is none."""
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype of torch")
    return dtype


def write_tensors(writer: CheckpointWriter, name: str, tensors: Sequence[Tensor]) -> StoredFile:
    """Write tensors into a file of a checkpoint, which is stored when this returns. Raises OSError."""
    return writer.write_file(name, lambda: (_view_bytes(each.detach().to("cpu").contiguous()) for each in tensors))


def read_tensors(
    checkpoint: StorageLike, manifest: Manifest, index: Index, tensors: Mapping[str, ChunkedTensor]
) -> None:
    """Fill this rank's pieces of tensors, of the shapes in the index, converting dtypes. No communication.

    Raises CheckpointError if elements are missing, or a file cannot be read.
    """
    place = open_storage(checkpoint)
    parts = [part for name, sharded in tensors.items() for part in _plan_reads(place, index, name, sharded)]
    parts.sort(key=lambda part: (part.stored.file, part.stored.first_byte))
    try:
        for number, some in itertools.groupby(parts, key=lambda part: part.stored.file):
            with open_verified(place, manifest, index.files[number]) as file:
                for part in some:
                    part.read(file)
    except OSError as error:
        raise CheckpointError(f"the checkpoint {place} cannot be read: {error}.") from error


@dataclass(frozen=True, eq=False)
class _ChunkRead:
    """The intersection of a stored rectangle and a piece: `sizes` elements at `offsets` of the full tensor."""

    stored: StoredChunk
    dtype: torch.dtype
    target: LocalChunk
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def read(self, file: BinaryIO) -> None:
        """Read the rows that hold the part; straight into the piece where both have the same layout."""
        shape = (self.sizes[0], *self.stored.sizes[1:]) if self.sizes else ()
        row = math.prod(self.stored.sizes[1:]) * self.dtype.itemsize
        first = self.offsets[0] - self.stored.offsets[0] if self.sizes else 0
        file.seek(self.stored.first_byte + first * row)
        target = self.target.tensor[self._slices(self.target.offsets)]
        alike = target.dtype == self.dtype and target.device.type == "cpu" and target.is_contiguous()
        if alike and shape == self.sizes:
            _read_into(file, target)
            return
        rows = torch.empty(shape, dtype=self.dtype)
        _read_into(file, rows)
        target.copy_(rows[(slice(None), *self._slices(self.stored.offsets)[1:])] if shape else rows)

    def _slices(self, origin: Iterable[int]) -> tuple[slice, ...]:
        return tuple(slice(a - b, a - b + n) for a, b, n in zip(self.offsets, origin, self.sizes, strict=True))


def _plan_reads(storage: StorageReader, index: Index, name: str, sharded: ChunkedTensor) -> list[_ChunkRead]:
    """List what to read for a tensor. Raises CheckpointError if elements are missing."""
    found: list[_ChunkRead] = []
    for piece in sharded.chunks:
        parts = index.tensors[name].intersect(piece)
        missing = piece.tensor.numel() - sum(math.prod(part.sizes) for part in parts)
        found += parts
        if missing:
            raise CheckpointError(f"the checkpoint {storage} is not whole: {name} lacks {missing} elements.")
    return found


def _view_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def _read_into(file: BinaryIO, tensor: Tensor) -> None:
    rest = _view_bytes(tensor)
    while rest:
        count = file.readinto(rest)  # type: ignore[attr-defined]
        if not count:
            raise OSError(f"{file.name} ends too early")
        rest = rest[count:]

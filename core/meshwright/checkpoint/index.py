"""The tensor index of a checkpoint: where the bytes of each chunk are stored, and how any rectangle is read from them.

`index.json` is {"files": names, "tensors": {name: {"shape", "dtype", "pieces"}}}. "pieces" is one list of integers: for
each chunk its file number, its first byte, its offsets and its sizes. The bytes of a chunk are its elements in
row-major order, little-endian, without gaps.
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
"""Name of the file that records where each tensor of a checkpoint is stored."""
_MAX_SHARDED_DIMS = 8
"""Maximum number of dims along which a tensor may be divided; parallelism divides two."""


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A full tensor in a checkpoint. `chunks`: int64, (number of chunks, 2 + 2 x dims), as in `index.json`."""

    shape: torch.Size
    dtype: torch.dtype
    chunks: np.ndarray

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def intersect(self, piece: LocalChunk) -> list[_ChunkRead]:
        """Return the reads that fill a local chunk from the stored chunks."""
        starts, lengths = self._get_rectangles()
        target_start = np.array(piece.offsets, np.int64)
        first = np.maximum(starts, target_start)
        last = np.minimum(starts + lengths, target_start + np.array(piece.sizes, np.int64))
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
        """Describe an error of the chunks; return None if they are valid.

        Valid chunks hold each element exactly once and are within files of these sizes in bytes.
        """
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
    """A rectangle of a tensor in a checkpoint: file number, first byte, offsets and sizes."""

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
    """Return the name of the file with a rank's tensors."""
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
    """Read the index of a checkpoint, and check that its chunks fit its tensors and files. Raises CheckpointError."""
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
    chunks = np.array(content["pieces"], np.int64).reshape(-1, 2 + 2 * len(shape))
    return StoredTensor(shape, parse_stored_dtype(content["dtype"]), chunks)


def _is_exact_cover(starts: np.ndarray, lengths: np.ndarray, shape: np.ndarray) -> bool:
    """Return whether rectangles with as many elements as a tensor hold each element of it exactly once.

    [Note: corners] The corners of the rectangles determine the parity of the number of rectangles at each element:
    corners where an even number of rectangles meet cancel. If only the corners of the tensor remain, each element is in
    an odd number of rectangles. Since the rectangles have no more elements than the tensor, that number is one.

    `starts` and `lengths` are int64, (number of rectangles, dims).
    """
    dims = shape.size
    corners = np.array(np.meshgrid(*[(0, 1)] * dims, indexing="ij"), np.int64).reshape(dims, -1).T
    all_corners = (starts[:, None] + corners * lengths[:, None]).reshape(-1, dims)
    unique_corners, counts = np.unique(all_corners, axis=0, return_counts=True)
    odd = unique_corners[counts % 2 == 1]
    return len(odd) == len(corners) and bool((odd == np.unique(corners * shape, axis=0)).all())


def format_dtype(dtype: torch.dtype) -> str:
    """Return the name of a dtype in files, such as "float32"."""
    return str(dtype).removeprefix("torch.")


def parse_stored_dtype(name: Any) -> torch.dtype:
    """Return the dtype of a name in files. Raises ValueError for an unknown name."""
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype of torch")
    return dtype


def write_tensors(writer: CheckpointWriter, name: str, tensors: Sequence[Tensor]) -> StoredFile:
    """Write tensors to a file of a checkpoint, which is durable on return. Raises OSError."""
    return writer.write_file(name, lambda: (_view_bytes(each.detach().to("cpu").contiguous()) for each in tensors))


def read_tensors(
    checkpoint: StorageLike, manifest: Manifest, index: Index, tensors: Mapping[str, ChunkedTensor]
) -> None:
    """Fill this rank's chunks of tensors from a checkpoint, converting dtypes. No communication.

    The full shapes must be those of the index. Raises CheckpointError if elements are missing or a file cannot be read.
    """
    storage = open_storage(checkpoint)
    reads = [read for name, sharded in tensors.items() for read in _plan_reads(storage, index, name, sharded)]
    reads.sort(key=lambda read: (read.stored.file, read.stored.first_byte))
    try:
        for number, file_reads in itertools.groupby(reads, key=lambda read: read.stored.file):
            with open_verified(storage, manifest, index.files[number]) as file:
                for read in file_reads:
                    read.read(file)
    except OSError as error:
        raise CheckpointError(f"the checkpoint {storage} cannot be read: {error}.") from error


@dataclass(frozen=True, eq=False)
class _ChunkRead:
    """The intersection of a stored chunk and a local chunk: `sizes` elements at `offsets` of the full tensor."""

    stored: StoredChunk
    dtype: torch.dtype
    target: LocalChunk
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def read(self, file: BinaryIO) -> None:
        """Read the rows that hold the intersection; directly into the target if both have the same layout."""
        shape = (self.sizes[0], *self.stored.sizes[1:]) if self.sizes else ()
        row_bytes = math.prod(self.stored.sizes[1:]) * self.dtype.itemsize
        first_row = self.offsets[0] - self.stored.offsets[0] if self.sizes else 0
        file.seek(self.stored.first_byte + first_row * row_bytes)
        target = self.target.tensor[self._slices(self.target.offsets)]
        has_same_format = target.dtype == self.dtype and target.device.type == "cpu" and target.is_contiguous()
        if has_same_format and shape == self.sizes:
            _read_into(file, target)
            return
        rows = torch.empty(shape, dtype=self.dtype)
        _read_into(file, rows)
        target.copy_(rows[(slice(None), *self._slices(self.stored.offsets)[1:])] if shape else rows)

    def _slices(self, origin: Iterable[int]) -> tuple[slice, ...]:
        return tuple(slice(a - b, a - b + n) for a, b, n in zip(self.offsets, origin, self.sizes, strict=True))


def _plan_reads(storage: StorageReader, index: Index, name: str, sharded: ChunkedTensor) -> list[_ChunkRead]:
    """List the reads for one tensor. Raises CheckpointError if elements are missing."""
    reads: list[_ChunkRead] = []
    for chunk in sharded.chunks:
        chunk_reads = index.tensors[name].intersect(chunk)
        missing = chunk.tensor.numel() - sum(math.prod(read.sizes) for read in chunk_reads)
        reads += chunk_reads
        if missing:
            raise CheckpointError(f"the checkpoint {storage} is not whole: {name} lacks {missing} elements.")
    return reads


def _view_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def _read_into(file: BinaryIO, tensor: Tensor) -> None:
    remaining = _view_bytes(tensor)
    while remaining:
        count = file.readinto(remaining)  # type: ignore[attr-defined]
        if not count:
            raise OSError(f"{file.name} ends too early")
        remaining = remaining[count:]

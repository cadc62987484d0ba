"""The bytes of a checkpoint's tensors: written in sequence, and read into any pieces. See `index` for their layout."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import torch
from torch import Tensor

from ..base.errors import CheckpointError
from ..tensors.pieces import Piece, Sharded
from .drafts import Draft
from .index import Index, StoredPiece
from .manifest import Manifest, StoredFile
from .places import Place, Where
from .remote import place_of
from .signed_reading import open_verified


def write_tensors(draft: Draft, name: str, tensors: Sequence[Tensor]) -> StoredFile:
    """Write tensors into a file of a checkpoint, which is stored when this returns. Raises OSError."""
    return draft.write(name, lambda: (_bytes_of(each.detach().to("cpu").contiguous()) for each in tensors))


def read_tensors(where: Where, manifest: Manifest, index: Index, tensors: Mapping[str, Sharded]) -> None:
    """Fill this rank's pieces of tensors from a checkpoint, converting dtypes. No communication.

    Args:
        tensors: by name; their shapes are those of the index.

    Raises CheckpointError if elements are missing, or a file cannot be read.
    """
    place = place_of(where)
    parts = [part for name, sharded in tensors.items() for part in _parts(place, index, name, sharded)]
    parts.sort(key=lambda part: (part.stored.file, part.stored.begin))
    try:
        for number, some in itertools.groupby(parts, key=lambda part: part.stored.file):
            with open_verified(place, manifest, index.files[number]) as file:
                for part in some:
                    part.read(file)
    except OSError as error:
        raise CheckpointError(f"the checkpoint {place} cannot be read: {error}.") from error


@dataclass(frozen=True, eq=False)
class _Part:
    """The intersection of a stored rectangle and a piece: `sizes` elements at `offsets` of the full tensor."""

    stored: StoredPiece
    dtype: torch.dtype
    piece: Piece
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def read(self, file: BinaryIO) -> None:
        """Read the rows that hold the part; straight into the piece where both have the same layout."""
        shape = (self.sizes[0], *self.stored.sizes[1:]) if self.sizes else ()
        row = math.prod(self.stored.sizes[1:]) * self.dtype.itemsize
        first = self.offsets[0] - self.stored.offsets[0] if self.sizes else 0
        file.seek(self.stored.begin + first * row)
        target = self.piece.tensor[self._slices(self.piece.offsets)]
        alike = target.dtype == self.dtype and target.device.type == "cpu" and target.is_contiguous()
        if alike and shape == self.sizes:
            _fill(file, target)
            return
        rows = torch.empty(shape, dtype=self.dtype)
        _fill(file, rows)
        target.copy_(rows[(slice(None), *self._slices(self.stored.offsets)[1:])] if shape else rows)

    def _slices(self, origin: Iterable[int]) -> tuple[slice, ...]:
        return tuple(slice(a - b, a - b + n) for a, b, n in zip(self.offsets, origin, self.sizes, strict=True))


def _parts(place: Place, index: Index, name: str, sharded: Sharded) -> list[_Part]:
    """List what to read for a tensor. Raises CheckpointError if elements are missing."""
    stored, found = index.tensors[name], []
    for piece in sharded.pieces:
        missing = piece.tensor.numel()
        for each in stored.meeting(piece.offsets, piece.sizes):
            first = tuple(map(max, piece.offsets, each.offsets))
            ends = (
                min(a + n, b + m)
                for a, n, b, m in zip(piece.offsets, piece.sizes, each.offsets, each.sizes, strict=True)
            )
            sizes = tuple(end - start for start, end in zip(first, ends, strict=True))
            found.append(_Part(each, stored.dtype, piece, first, sizes))
            missing -= math.prod(sizes)
        if missing:
            raise CheckpointError(f"the checkpoint {place} is not whole: {name} lacks {missing} elements.")
    return found


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def _fill(file: BinaryIO, tensor: Tensor) -> None:
    rest = _bytes_of(tensor)
    while rest:
        count = file.readinto(rest)  # type: ignore[attr-defined]
        if not count:
            raise OSError(f"{file.name} ends too early")
        rest = rest[count:]

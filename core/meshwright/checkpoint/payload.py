"""The bytes of a checkpoint's tensors: written one after the other, and read into whatever pieces are asked for.

See `meshwright.checkpoint.index` for where they lie. Nothing but the elements themselves is in these files.
"""

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
from .opening import place_of
from .places import Place, Where
from .signed_reading import open_verified


def write_tensors(draft: Draft, name: str, tensors: Sequence[Tensor]) -> StoredFile:
    """Write tensors into a file of a checkpoint, and have it stored.

    Raises:
        OSError: the disk does not take it.
    """
    return draft.write(name, lambda: (_bytes_of(each.detach().to("cpu").contiguous()) for each in tensors))


def read_tensors(where: Where, manifest: Manifest, index: Index, tensors: Mapping[str, Sharded]) -> None:
    """Fill this rank's pieces of tensors from a checkpoint. No communication.

    Args:
        where: the checkpoint.
        manifest, index: of it.
        tensors: by name; their shapes are those of the index. Other dtypes are converted to.

    Raises:
        CheckpointError: it lacks elements, or a file cannot be read.
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
    """What one stored rectangle and one piece have in common: `sizes` elements at `offsets` of the whole."""

    stored: StoredPiece
    dtype: torch.dtype
    piece: Piece
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def read(self, file: BinaryIO) -> None:
        """Read the rows that the part touches, straight into the piece where they lie there as they do in the file."""
        shape = (self.sizes[0], *self.stored.sizes[1:]) if self.sizes else ()
        row = math.prod(self.stored.sizes[1:]) * self.dtype.itemsize
        first = self.offsets[0] - self.stored.offsets[0] if self.sizes else 0
        file.seek(self.stored.begin + first * row)
        target = self._target()
        alike = target.dtype == self.dtype and target.device.type == "cpu" and target.is_contiguous()
        if alike and shape == self.sizes:
            _fill(file, target)
            return
        rows = torch.empty(shape, dtype=self.dtype)
        _fill(file, rows)
        columns = (slice(a - b, a - b + n) for a, b, n in self._against(self.stored.offsets))
        target.copy_(rows[(slice(None), *list(columns)[1:])] if shape else rows)

    def _target(self) -> Tensor:
        return self.piece.tensor[tuple(slice(a - b, a - b + n) for a, b, n in self._against(self.piece.offsets))]

    def _against(self, offsets: tuple[int, ...]) -> Iterable[tuple[int, int, int]]:
        return zip(self.offsets, offsets, self.sizes, strict=True)


def _parts(place: Place, index: Index, name: str, sharded: Sharded) -> list[_Part]:
    """What is to be read for a tensor.

    Raises:
        CheckpointError: elements are missing.
    """
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
    """The memory of a contiguous tensor on the CPU."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def _fill(file: BinaryIO, tensor: Tensor) -> None:
    rest = _bytes_of(tensor)
    while rest:
        count = file.readinto(rest)  # type: ignore[attr-defined]
        if not count:
            raise OSError(f"{file.name} ends too early")
        rest = rest[count:]

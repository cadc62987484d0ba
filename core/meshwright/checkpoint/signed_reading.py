"""Read a part of a signed file, and nothing but what was signed.

A checkpoint is verified before it is read. Whoever can write to its directory may exchange a file between the two. So
where a key is given, the manifest has checksums of chunks of what is read in part, and each chunk is compared with its
own when it is read, before anything is made of it.

This module imports no torch.
"""

from __future__ import annotations

import hashlib
import io
from contextlib import AbstractContextManager
from typing import Any, BinaryIO

from .manifest import CHUNK, Manifest, StoredFile, changed
from .places import Place


class Chunks:
    """Checksums of the chunks of what comes in parts."""

    def __init__(self) -> None:
        self._done: list[str] = []
        self._digest, self._room = hashlib.sha256(), CHUNK

    def update(self, part: Any) -> None:
        """Add bytes."""
        rest = memoryview(part).cast("B")
        while rest:
            some, rest = rest[: self._room], rest[self._room :]
            self._digest.update(some)
            self._room -= some.nbytes
            if not self._room:
                self._end()

    def digests(self) -> tuple[str, ...]:
        """Of all chunks, the last of which may be shorter; no more is added."""
        if self._room < CHUNK:
            self._end()
        return tuple(self._done)

    def _end(self) -> None:
        self._done.append(self._digest.hexdigest())
        self._digest, self._room = hashlib.sha256(), CHUNK


def open_verified(place: Place, manifest: Manifest, name: str) -> AbstractContextManager[BinaryIO]:
    """A file of a checkpoint, to be read in part; signed chunks are verified as they are read.

    Raises:
        OSError: it cannot be opened.
    """
    file, stored = place.open(name), manifest.files[name]
    if place.access.key is None or not stored.chunks:
        return file
    return io.BufferedReader(_Verified(file, stored, place, name), 1)


class _Verified(io.RawIOBase):
    """A file whose chunks are compared with their checksums, the last one of which is kept.

    Raises:
        CheckpointError: when a chunk is read that has changed.
    """

    def __init__(self, file: BinaryIO, stored: StoredFile, place: Place, name: str) -> None:
        self._file, self._stored, self._place, self.name = file, stored, place, name
        self._position, self._number, self._chunk = 0, -1, memoryview(b"")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._stored.size}[whence]
        self._position = start + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        room = memoryview(buffer).cast("B")
        number, begin = divmod(self._position, CHUNK)
        if not room or self._position >= self._stored.size:
            return 0
        if number != self._number:
            self._chunk, self._number = self._read(number), number
        some = self._chunk[begin : begin + room.nbytes]
        room[: len(some)] = some
        self._position += len(some)
        return len(some)

    def _read(self, number: int) -> memoryview:
        size = min(CHUNK, self._stored.size - number * CHUNK)
        found = bytearray(size)
        rest = memoryview(found)
        self._file.seek(number * CHUNK)
        while rest:
            count = self._file.readinto(rest)  # type: ignore[attr-defined]
            if not count:
                raise changed(self._place, self.name)
            rest = rest[count:]
        if number >= len(self._stored.chunks) or hashlib.sha256(found).hexdigest() != self._stored.chunks[number]:
            raise changed(self._place, self.name)
        return memoryview(found)

    def close(self) -> None:
        self._file.close()
        super().close()

"""Read parts of a signed file, and only what was signed.

Whoever can write to a checkpoint's directory may exchange a file after it was verified. Where a key is given, the
manifest therefore has a checksum for each chunk of the files that are read in part, and a chunk is compared with its
checksum before its bytes are used. This module imports no torch.
"""

from __future__ import annotations

import hashlib
import io
from contextlib import AbstractContextManager
from typing import Any, BinaryIO

from .manifest import CHUNK, Manifest, StoredFile, changed
from .places import Place, SeekableReader


class Chunks:
    """Checksums of the chunks of a file that is written in parts."""

    def __init__(self) -> None:
        self._done: list[str] = []
        self._digest, self._room = hashlib.sha256(), CHUNK

    def update(self, part: Any) -> None:
        rest = memoryview(part).cast("B")
        while rest:
            some, rest = rest[: self._room], rest[self._room :]
            self._digest.update(some)
            self._room -= some.nbytes
            if not self._room:
                self._end()

    def digests(self) -> tuple[str, ...]:
        """Return the checksums of all chunks, the last of which may be shorter. Nothing can be added afterwards."""
        if self._room < CHUNK:
            self._end()
        return tuple(self._done)

    def _end(self) -> None:
        self._done.append(self._digest.hexdigest())
        self._digest, self._room = hashlib.sha256(), CHUNK


def open_verified(place: Place, manifest: Manifest, name: str) -> AbstractContextManager[BinaryIO]:
    """Open a file of a checkpoint to read parts of it; signed chunks are verified as they are read. Raises OSError."""
    file, stored = place.open(name), manifest.files[name]
    if place.access.key is None or not stored.chunks:
        return file
    return io.BufferedReader(_Verified(file, stored, place, name), 1)


class _Verified(SeekableReader):
    """A file whose chunks are compared with their checksums; reading one that changed raises CheckpointError."""

    def __init__(self, file: BinaryIO, stored: StoredFile, place: Place, name: str) -> None:
        super().__init__(name)
        self._file, self._stored, self._place = file, stored, place
        self._number, self._chunk = -1, memoryview(b"")

    def _size(self) -> int:
        return self._stored.size

    def _read_at(self, position: int, buffer: memoryview) -> int:
        number, begin = divmod(position, CHUNK)
        if not buffer or position >= self._stored.size:
            return 0
        if number != self._number:
            self._chunk, self._number = self._read_chunk(number), number
        some = self._chunk[begin : begin + buffer.nbytes]
        buffer[: len(some)] = some
        return len(some)

    def _read_chunk(self, number: int) -> memoryview:
        found = bytearray(min(CHUNK, self._stored.size - number * CHUNK))
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

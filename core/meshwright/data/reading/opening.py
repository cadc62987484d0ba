"""Open files as they are or compressed, and say what is wrong with one in words of its user.

Only so much of a file is ever in memory as its reader asks for.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from ...base.errors import DataError
from ...files.parsing import open_regular
from ..extras import extra
from ..progress import Meter

COMPRESSED = (".gz", ".zst")
_CHUNK = 1 << 20
_COMPRESSED_CHUNK = 1 << 12
"""Of what may become 32,768 times as much."""
FREE, MOST_TIMES = 1 << 26, 500
"""A file may become so many bytes, and beyond that so many times its size: text shrinks to a tenth or so, and what
shrinks more is made to fill a memory."""


def kind_of(path: Path) -> str:
    """The suffix that tells what is in a file, without that of its compression; in small letters."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    return next((suffix for suffix in reversed(suffixes) if suffix not in COMPRESSED), "")


@contextmanager
def opened(path: Path, meter: Meter) -> Iterator[BinaryIO]:
    """The content of a file, without its compression; a context, in which what is wrong with it is a DataError.

    Raises:
        DataError: it cannot be read, or its compressed content is broken.
    """
    compression = path.suffix.lower()
    broken: tuple[type[Exception], ...] = (gzip.BadGzipFile, EOFError, zlib.error)
    zstandard = extra("zstandard", f"reading {path}") if compression == ".zst" else None
    if zstandard is not None:
        broken = (zstandard.ZstdError, EOFError)
    try:
        with open_regular(path) as file:
            meter.file = file
            if compression == ".gz":
                yield io.BufferedReader(_Bounded(gzip.GzipFile(fileobj=file), file), _CHUNK)
            elif zstandard is not None:
                yield io.BufferedReader(_Bounded(_Zst(file, zstandard), file), _CHUNK)
            else:
                yield file
    except broken as error:
        raise DataError(
            f"{path}: the compressed content is broken or cut off ({error}). Compress or copy the file again."
        ) from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error


class _Bounded(io.RawIOBase):
    """The content of a compressed file, as long as it is not far larger than the file itself.

    Raises:
        DataError: it is.
    """

    def __init__(self, content: Any, file: BinaryIO) -> None:
        self._content, self._file, self._count = content, file, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = int(self._content.readinto(memoryview(buffer)[:_CHUNK]))
        self._count += count
        if self._count > FREE and self._count > MOST_TIMES * self._file.tell():
            raise DataError(
                f"{getattr(self._file, 'name', 'the file')}: the compressed content is more than {MOST_TIMES} times "
                f"as large as the file. Give the file as it is, without its compression, if that is what it holds."
            )
        return count


class _Zst(io.RawIOBase):
    """The content of frames of Zstandard, one after the other; the library's own reader takes a cut file for whole."""

    def __init__(self, file: BinaryIO, zstandard: Any) -> None:
        self._file = file
        self._zstandard = zstandard
        self._frame: Any = None
        self._rest = b""
        self._content = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._content:
            compressed = self._rest or self._file.read(_COMPRESSED_CHUNK)
            if not compressed:
                if self._frame is not None:
                    raise EOFError("a frame of Zstandard has no end")
                return 0
            frame = self._frame or self._zstandard.ZstdDecompressor().decompressobj()
            self._content = memoryview(frame.decompress(compressed))
            self._rest = frame.unused_data
            self._frame = None if frame.eof else frame
        count = min(len(buffer), len(self._content))
        buffer[:count] = self._content[:count]
        self._content = self._content[count:]
        return count

"""Write an array of one dimension to a .npy file, piece by piece, however long it becomes.

The header of such a file says how many values there are, so it is written last, into room that was left for it.
Source: the .npy format, numpy.lib.format.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

HEADER_BYTES = 128
_CHUNK = 1 << 20


class ArrayFile:
    """One array; whole when it is closed.

    Attributes:
        path: of the file.
        dtype: of the values.
    """

    def __init__(self, path: Path, dtype: np.dtype) -> None:
        self.path = path
        self.dtype = dtype
        self._count = 0
        self._file = path.open("w+b")
        self._file.write(bytes(HEADER_BYTES))

    def __len__(self) -> int:
        return self._count

    def append(self, values: np.ndarray) -> None:
        """Write values at the end, which are of the file's dtype or fit into it."""
        self._file.write(values.astype(self.dtype, copy=False).tobytes())
        self._count += len(values)

    def read(self, start: int, stop: int) -> np.ndarray:
        """The values of [start, stop), a copy."""
        self._seek(start)
        found = np.frombuffer(self._file.read((stop - start) * self.dtype.itemsize), self.dtype)
        self._seek(self._count)
        return found

    def pieces(self, start: int = 0) -> Iterator[tuple[int, np.ndarray]]:
        """The values from `start` on, a piece at a time, each with its place."""
        for position in range(start, self._count, _CHUNK):
            yield position, self.read(position, min(position + _CHUNK, self._count))

    def put(self, start: int, values: np.ndarray) -> None:
        """Write values in the place of others."""
        self._seek(start)
        self._file.write(values.astype(self.dtype, copy=False).tobytes())
        self._seek(self._count)

    def take_out(self, start: int, stop: int) -> np.ndarray:
        """Remove the values of [start, stop), and return them."""
        taken = self.read(start, stop)
        for position, moved in self.pieces(stop):
            self.put(position - (stop - start), moved)
        self._count -= stop - start
        self._seek(self._count)
        self._file.truncate()
        return taken

    def close(self) -> None:
        """Write the header; the file is whole."""
        with self._file:
            self._file.seek(0)
            self._file.write(self._header())

    def leave(self) -> None:
        """Close the file without its header: it is no array."""
        self._file.close()

    def _seek(self, place: int) -> None:
        self._file.seek(HEADER_BYTES + place * self.dtype.itemsize)

    def _header(self) -> bytes:
        start = np.lib.format.magic(1, 0)
        text = repr({"descr": self.dtype.str, "fortran_order": False, "shape": (self._count,)}).encode("latin1")
        size = HEADER_BYTES - len(start) - 2
        return start + size.to_bytes(2, "little") + text.ljust(size - 1) + b"\n"

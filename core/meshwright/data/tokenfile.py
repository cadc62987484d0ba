"""Write a stream of tokens to a .npy file, piece by piece, however long it becomes.

The header of such a file says how many there are, so it is written last, into room that was left for it.
Source: the .npy format, numpy.lib.format.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

import numpy as np

_HEADER_BYTES = 128
_CHUNK = 1 << 20


class TokenFile:
    """One stream of tokens; a context, on leaving which the file is whole.

    Attributes:
        tokens: how many have been written.
    """

    def __init__(self, path: Path, dtype: np.dtype) -> None:
        self.tokens = 0
        self._dtype = dtype
        self._file = path.open("w+b")
        self._file.write(bytes(_HEADER_BYTES))

    def __enter__(self) -> TokenFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._file:
            if error is None:
                self._file.seek(0)
                self._file.write(self._header())

    def append(self, tokens: np.ndarray) -> None:
        """Write tokens of the stream's dtype at its end."""
        self._file.write(tokens.tobytes())
        self.tokens += len(tokens)

    def take_out(self, start: int, stop: int) -> np.ndarray:
        """Remove the tokens of [start, stop), and return them."""
        taken = self._read(start, stop)
        for position in range(stop, self.tokens, _CHUNK):
            moved = self._read(position, min(position + _CHUNK, self.tokens))
            self._seek(position - (stop - start))
            self._file.write(moved.tobytes())
        self.tokens -= stop - start
        self._seek(self.tokens)
        self._file.truncate()
        return taken

    def _read(self, start: int, stop: int) -> np.ndarray:
        self._seek(start)
        return np.frombuffer(self._file.read((stop - start) * self._dtype.itemsize), self._dtype)

    def _seek(self, token: int) -> None:
        self._file.seek(_HEADER_BYTES + token * self._dtype.itemsize)

    def _header(self) -> bytes:
        start = np.lib.format.magic(1, 0)
        text = repr({"descr": self._dtype.str, "fortran_order": False, "shape": (self.tokens,)}).encode("latin1")
        size = _HEADER_BYTES - len(start) - 2
        return start + size.to_bytes(2, "little") + text.ljust(size - 1) + b"\n"

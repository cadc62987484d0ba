"""A file that grows by whole lines, on a disk that may take nothing for a while. No torch in this module."""

from __future__ import annotations

import os
from pathlib import Path

from ..files.writing import open_to_append


class Lines:
    """Adds to a file. What could not be written is kept and comes before what is added next, so that a disk that is
    well again has all; and no line is there in half, unless the process is killed.

    Args:
        path: what it has stays. Nobody else writes to it.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._file = open_to_append(path)
        self._size = os.fstat(self._file).st_size
        self._rest = b""

    def add(self, text: str) -> OSError | None:
        """Add lines; why they have to wait, if they have to."""
        self._rest += text.encode()
        rest = memoryview(self._rest)
        try:
            if os.fstat(self._file).st_size != self._size:
                # A part of a line, from the last time.
                os.ftruncate(self._file, self._size)
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError as error:
            return error
        self._size += len(self._rest)
        self._rest = b""
        return None

    def close(self) -> None:
        os.close(self._file)

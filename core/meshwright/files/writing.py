"""Write files of a run's directory: whole, and never through a link.

A directory that came from elsewhere may have links of the names that a run writes. A file that is written whole gets
its name by a rename, which replaces a link; one that grows is not opened through a link. No torch in this module.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def write_whole(path: Path, content: str | bytes, *, mode: int = 0o666) -> None:
    """Write a file that is there whole or not at all. OSError: it cannot be written.

    Args:
        content: text is written as UTF-8.
        mode: who may read and write it, less what the process withholds from all its files.
    """
    with written_whole(path, mode=mode) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def written_whole(path: Path, *, mode: int = 0o666) -> Iterator[BinaryIO]:
    """An empty file to write into, which gets its name when the context is left without an error."""
    new = fresh(path.with_name(f"{path.name}.tmp"))
    try:
        with open(os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "w+b") as file:
            yield file
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    new.replace(path)


def fresh(path: Path) -> Path:
    """The path, with nothing there any more, for a library that opens it itself."""
    path.unlink(missing_ok=True)
    return path


def open_to_append(path: Path) -> int:
    """Open a file that grows, and make it if it is missing; the caller closes it.

    Raises:
        OSError: it is a link or a pipe, or cannot be opened.
    """
    # At a pipe that nobody reads, one would wait for ever.
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    file = os.open(path, flags, 0o666)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "it is no file", str(path))
    return file


def append(path: Path, text: str) -> None:
    """Add text to a file. OSError: as `open_to_append`."""
    with open(open_to_append(path), "w", encoding="utf-8") as file:
        file.write(text)

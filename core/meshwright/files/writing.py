"""Write files atomically, and never through a symbolic link. Imports no torch.

A directory from elsewhere may contain links with the names of files that a run writes. A complete file gets its name by
a rename, which replaces a link. A file for appending is not opened through a link.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, BinaryIO

from pydantic import AfterValidator


def check_path(value: str) -> str:
    """Raise ValueError if no file can have this path, so that a run does not fail later; else return it."""
    if not value or "\0" in value:
        raise ValueError("is no path: it is empty, or holds a zero byte")
    if any(len(part.encode()) > 255 for part in value.split("/")) or len(value.encode()) > 4000:
        raise ValueError("is too long for a path: 255 bytes between slashes, 4,000 in all")
    if value.startswith("~"):
        try:
            Path(value).expanduser()
        except RuntimeError:
            raise ValueError("names the home directory of a user who is unknown here") from None
    return value


PathStr = Annotated[str, AfterValidator(check_path)]
"""Path of a file or directory in a config; it need not exist."""


def write_atomically(path: Path, content: str | bytes, *, mode: int = 0o666) -> None:
    """Write a file atomically; text is encoded as UTF-8. Raises OSError.

    `mode`: permissions of the file, before the process's umask.
    """
    with atomic_writer(path, mode=mode) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def atomic_writer(path: Path, *, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Yield an empty file, which gets its name when the context exits without an error."""
    new = remove_existing(path.with_name(f"{path.name}.tmp"))
    try:
        with open(os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "w+b") as file:
            yield file
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    new.replace(path)


def remove_existing(path: Path) -> Path:
    """Remove a file if it exists, and return its path, for a library that creates the file."""
    path.unlink(missing_ok=True)
    return path


def open_for_append(path: Path) -> int:
    """Open a regular file for appending, creating it if needed; return its descriptor, which the caller closes.

    Raises OSError.
    """
    # Without O_NONBLOCK, opening a pipe without a reader blocks forever.
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    file = os.open(path, flags, 0o666)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "it is no file", str(path))
    return file


def append_text(path: Path, text: str) -> None:
    """Append text to a file. Raises OSError."""
    with open(open_for_append(path), "w", encoding="utf-8") as file:
        file.write(text)

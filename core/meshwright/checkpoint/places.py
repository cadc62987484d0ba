"""Where a checkpoint lies, and how it is reached: all that reading one needs.

[Note: places] A place has files by name: which there are and how large, and the bytes of each, in a file that can be
sought in. Manifest, index, tensors, export and verification need nothing else of it, so that they do not know whether a
checkpoint lies in a directory, behind a URL, or in memory. A `Folder` is a place that may hold others, by name; who
writes into one is in `drafts`. See docs/decisions/0027-places-of-checkpoints.md.

This module imports no torch.
"""

from __future__ import annotations

import errno
import io
import os
import random
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeAlias, TypeVar

from ..files.parsing import open_regular
from ..files.terminal import warn
from .keys import Key

T = TypeVar("T")

STEP = re.compile(r"step-(\d+)")
"""The name of a checkpoint of a run."""
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0
_TRANSIENT = frozenset(
    {
        *(errno.EIO, errno.EAGAIN, errno.ESTALE, errno.ETIMEDOUT, errno.EBUSY, errno.EINTR),
        *(errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED, errno.EPIPE, errno.EHOSTUNREACH, errno.ENETUNREACH),
    }
)
"""Of errors that may be gone a moment later. A full disk, or one that may not be written to, stays so."""


@dataclass(frozen=True)
class Access:
    """How places are reached.

    Attributes:
        key: that checkpoints are signed with, and must be; None: signatures are neither made nor looked at.
        retries: attempts after the first, where an error may be gone a moment later.
    """

    key: Key | None = None
    retries: int = 3


DEFAULT = Access()


class Place(Protocol):
    """A checkpoint that can be read; as a string it is what people call it. See [Note: places]."""

    @property
    def name(self) -> str:
        """The last part of what it is called, such as "step-00000100"."""

    @property
    def access(self) -> Access:
        """How it is reached."""

    def sizes(self) -> dict[str, int] | None:
        """Bytes of each file by its name, with slashes; None: there is no such place. OSError: it cannot be read."""

    def open(self, name: str) -> BinaryIO:
        """A file, to be read: `seek`, `read` and `readinto`. OSError: it cannot be."""

    def hint(self) -> str:
        """What else is known that helps whoever finds it broken: sentences after a blank, or nothing."""


class Folder(Place, Protocol):
    """A place that may hold others."""

    def at(self, name: str) -> Folder:
        """The place of a name in it, which need not exist."""

    def names(self) -> list[str]:
        """Of the places in it; none where it does not exist. OSError: it cannot be read."""

    @property
    def parent(self) -> Folder:
        """What it lies in."""

    def is_same(self, other: Place) -> bool:
        """Whether another name is one of this place."""

    def remove(self) -> None:
        """Remove a checkpoint, so that no part of it is ever seen under its name. OSError: it cannot be."""


@dataclass(frozen=True)
class LocalFolder:
    """A directory of a file system."""

    path: Path
    access: Access = DEFAULT

    def __str__(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def parent(self) -> LocalFolder:
        return LocalFolder(self.path.parent, self.access)

    def at(self, name: str) -> LocalFolder:
        return LocalFolder(self.path / name, self.access)

    def is_same(self, other: Place) -> bool:
        return isinstance(other, LocalFolder) and self.path.resolve() == other.path.resolve()

    def names(self) -> list[str]:
        return retried(self._names, self.access, f"reading {self}")

    def _names(self) -> list[str]:
        return [path.name for path in self.path.iterdir() if path.is_dir()] if self.path.is_dir() else []

    def sizes(self) -> dict[str, int] | None:
        return retried(self._sizes, self.access, f"reading {self}")

    def _sizes(self) -> dict[str, int] | None:
        if not self.path.is_dir():
            return None
        found = {}
        # Links to directories may lead in a circle; those to files, as in the hub's cache, cannot.
        for directory, _, names in os.walk(self.path, onerror=_raise):
            for path in (Path(directory, name) for name in names):
                if path.is_file():
                    found[path.relative_to(self.path).as_posix()] = path.stat().st_size
        return found

    def open(self, name: str) -> BinaryIO:
        path = self.path / name
        return steady(lambda: open_regular(path, buffering=0), self.access, str(path))

    def remove(self) -> None:
        doomed = self.path.with_name(f"{self.name}.deleting")
        shutil.rmtree(doomed, ignore_errors=True)
        self.path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)

    def hint(self) -> str:
        former, told = self.path.with_name(f"{self.name}.replaced"), ""
        if former.is_dir() and not self.path.exists():
            told = f" A save over it was interrupted: its former contents are {former.name}."
        return told + others_of(self)


Where: TypeAlias = str | Path | Place
"""What a checkpoint is named by: a path, a URL, or a place that was found before."""


def steps_of(folder: Folder) -> list[tuple[int, Folder]]:
    """Step and place of each checkpoint in a folder, whole or not, the newest first. OSError: it cannot be read."""
    found = [(int(match[1]), folder.at(name)) for name in folder.names() if (match := STEP.fullmatch(name))]
    return sorted(found, key=lambda each: (each[0], each[1].name), reverse=True)


def path_or_url(place: Place) -> Path | str:
    """What it is called: a path where it is a directory."""
    return place.path if isinstance(place, LocalFolder) else str(place)


def others_of(folder: Folder) -> str:
    """Which checkpoints lie beside one, for the end of a message."""
    try:
        names = [place.name for _, place in steps_of(folder.parent) if place.name != folder.name]
    except OSError:
        return ""
    return f" Others beside it: {', '.join(names[:5])}." if names else ""


# -- trying again


def retried(work: Callable[[], T], access: Access, what: str) -> T:
    """Do something that may be done again, and do so where it meets an error that may be gone a moment later.

    Args:
        what: is done, for the warning that tells of it.

    Raises:
        OSError: as the last attempt.
    """
    for attempt in range(access.retries):
        try:
            return work()
        except OSError as error:
            if not is_transient(error):
                raise
            # Ranks that were disturbed together come again one after the other; the generators of training stay as
            # they are.
            longest = min(FIRST_WAIT_S * 2**attempt, LONGEST_WAIT_S)
            wait_s = longest * random.SystemRandom().uniform(0.5, 1.0)
            warn(
                f"{what} failed: {error}. Trying again in {wait_s:.1f} s ({attempt + 1} of {access.retries}).",
                stacklevel=2,
            )
            time.sleep(wait_s)
    return work()


def is_transient(error: OSError) -> bool:
    """Whether an error may be gone a moment later."""
    return isinstance(error, ConnectionError | TimeoutError) or error.errno in _TRANSIENT


def steady(open_again: Callable[[], BinaryIO], access: Access, name: str) -> BinaryIO:
    """A file for reading that is opened again where it fails, and goes on where it was."""
    return io.BufferedReader(_Steady(open_again, access, name))


class _Steady(io.RawIOBase):
    def __init__(self, open_again: Callable[[], BinaryIO], access: Access, name: str) -> None:
        self._open_again, self._access, self.name = open_again, access, name
        self._file: BinaryIO | None = None
        self._position = 0
        self._retried(self._opened)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence == os.SEEK_END:
            offset += self._retried(lambda: self._opened().seek(0, os.SEEK_END))
        self._position = offset + (self._position if whence == os.SEEK_CUR else 0)
        return self._position

    def readinto(self, buffer: Any) -> int:
        def read() -> int:
            file = self._opened()
            file.seek(self._position)
            return int(file.readinto(buffer) or 0)  # type: ignore[attr-defined]

        count = self._retried(read)
        self._position += count
        return count

    def close(self) -> None:
        self._let_go()
        super().close()

    def _retried(self, work: Callable[[], T]) -> T:
        def attempt() -> T:
            try:
                return work()
            except OSError:
                self._let_go()
                raise

        return retried(attempt, self._access, f"reading {self.name}")

    def _opened(self) -> BinaryIO:
        if self._file is None:
            self._file = self._open_again()
        return self._file

    def _let_go(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError:
                # It has failed before.
                return


def _raise(error: OSError) -> None:
    raise error

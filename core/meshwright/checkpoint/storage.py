"""Storage of checkpoints: directories, URLs, and whatever else can list and open files; and the keys that sign them.

[Note: places] A `Place` lists its files with their sizes and opens them. Reading, verifying and exporting a checkpoint
need no more, so that they work alike for directories, object stores and memory. A `Storage` is a place that holds other
places and can be written to. See docs/decisions/0027-places-of-checkpoints.md.

This module imports no torch.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import io
import os
import random
import re
import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, Protocol, TypeAlias, TypeVar

from ..base.errors import ConfigError
from ..files.parsing import open_regular_file, read_regular_file
from ..files.terminal import warn

T = TypeVar("T")

STEP_PATTERN = re.compile(r"step-(\d+)")
"""Name of a run's checkpoint."""
INITIAL_BACKOFF_S, MAX_BACKOFF_S = 0.5, 30.0
MIN_KEY_BYTES = 32
"""Of a key."""
# Errors that may be temporary. A full or read-only disk is not among them.
_TRANSIENT = frozenset(
    {
        *(errno.EIO, errno.EAGAIN, errno.ESTALE, errno.ETIMEDOUT, errno.EBUSY, errno.EINTR),
        *(errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED, errno.EPIPE, errno.EHOSTUNREACH, errno.ENETUNREACH),
    }
)


class SigningKey:
    """A secret of at least 32 bytes, never printed or sent. It signs manifests by HMAC-SHA256 of format and checksum.

    The manifest holds checksums of all files and of itself, so the signature covers every byte.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def __repr__(self) -> str:
        return "Key(...)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a key is sent to nobody: each process reads the file")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SigningKey) and hmac.compare_digest(self._secret, other._secret)

    def __hash__(self) -> int:
        return self.fingerprint

    @property
    def fingerprint(self) -> int:
        """A number below 2**62 by which ranks compare keys without revealing them."""
        return int.from_bytes(self._compute_hmac(b"meshwright key")[:8]) >> 2

    def sign(self, version: int, checksum: str) -> str:
        return self._compute_hmac(f"meshwright checkpoint {version} {checksum}".encode()).hex()

    def verify(self, version: int, checksum: str, signature: str | None) -> bool:
        own = self.sign(version, checksum)
        return isinstance(signature, str) and hmac.compare_digest(own.encode(), signature.encode())

    def _compute_hmac(self, text: bytes) -> bytes:
        return hmac.new(self._secret, text, hashlib.sha256).digest()


def read_signing_key(path: str | Path, *, where: str) -> SigningKey:
    """Read the key that a file holds: all of its bytes. `where` names the file in errors. Raises ConfigError."""
    make_one = f"openssl rand -out FILE {MIN_KEY_BYTES} makes one."
    try:
        secret = read_regular_file(Path(path).expanduser())
    except OSError as error:
        raise ConfigError(
            f"{where}={str(path)!r} cannot be read: {error.strerror}. Name a file with a secret of at least "
            f"{MIN_KEY_BYTES} bytes; {make_one}"
        ) from None
    if len(secret) < MIN_KEY_BYTES:
        raise ConfigError(
            f"{where}={str(path)!r} holds {len(secret)} bytes, which are too few for a secret: at least "
            f"{MIN_KEY_BYTES}. "
            f"{make_one}"
        )
    return SigningKey(secret)


@dataclass(frozen=True)
class StorageOptions:
    """How to reach places.

    Attributes:
        key: signs manifests, and must have signed those that are read; None: signatures are neither made nor checked.
        max_retries: attempts after the first one that fails with a temporary error.
    """

    key: SigningKey | None = None
    max_retries: int = 3


DEFAULT_OPTIONS = StorageOptions()


class StorageReader(Protocol):
    """A checkpoint that can be read. `str()` gives the name that messages use. See [Note: places]."""

    @property
    def name(self) -> str:
        """Last part of the name, such as "step-00000100"."""

    @property
    def options(self) -> StorageOptions: ...

    def list_file_sizes(self) -> dict[str, int] | None:
        """Size in bytes of each file, by its name with slashes; None if the place does not exist. Raises OSError."""

    def open(self, name: str) -> BinaryIO:
        """Open a file for `seek`, `read` and `readinto`. Raises OSError."""

    def format_hint(self) -> str:
        """Return sentences, after a space, that help a user who finds the checkpoint broken; or ""."""


class Storage(StorageReader, Protocol):
    """A place that can hold other places, and be written to."""

    def child(self, name: str) -> Storage:
        """Return the place of this name inside; it need not exist."""

    def list_children(self) -> list[str]:
        """List the places inside; empty if this one does not exist. Raises OSError."""

    @property
    def parent(self) -> Storage: ...

    def is_same_as(self, other: StorageReader) -> bool:
        """Return whether both names stand for one place."""

    def write_file(self, name: str, parts: Iterable[Any]) -> None:
        """Write a file from its parts, which is stored when this returns. Raises OSError."""

    def move_to(self, destination: Any) -> None:
        """Move this checkpoint to another place of the same kind. Raises OSError."""

    def remove(self) -> None:
        """Remove this checkpoint; no part of it stays visible under its name. Raises OSError."""


StorageLike: TypeAlias = str | Path | StorageReader
"""What names a checkpoint: a path, a URL, or a place."""


@dataclass(frozen=True)
class LocalStorage:
    """A directory of a file system."""

    path: Path
    options: StorageOptions = DEFAULT_OPTIONS

    def __str__(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def parent(self) -> LocalStorage:
        return LocalStorage(self.path.parent, self.options)

    def child(self, name: str) -> LocalStorage:
        return LocalStorage(self.path / name, self.options)

    def is_same_as(self, other: StorageReader) -> bool:
        return isinstance(other, LocalStorage) and self.path.resolve() == other.path.resolve()

    def list_children(self) -> list[str]:
        def names() -> list[str]:
            return [path.name for path in self.path.iterdir() if path.is_dir()] if self.path.is_dir() else []

        return retry(names, self.options, f"reading {self}")

    def list_file_sizes(self) -> dict[str, int] | None:
        def sizes() -> dict[str, int] | None:
            if not self.path.is_dir():
                return None
            # Links to directories may form a cycle; links to files, as in the hub's cache, cannot.
            walked = os.walk(self.path, onerror=_raise)
            paths = [Path(directory, name) for directory, _, names in walked for name in names]
            return {path.relative_to(self.path).as_posix(): path.stat().st_size for path in paths if path.is_file()}

        return retry(sizes, self.options, f"reading {self}")

    def open(self, name: str) -> BinaryIO:
        path = self.path / name
        return open_with_retry(lambda: open_regular_file(path, buffering=0), self.options, str(path))

    def format_hint(self) -> str:
        former, hint = self.path.with_name(f"{self.name}.replaced"), ""
        if former.is_dir() and not self.path.exists():
            hint = f" A save over it was interrupted: its former contents are {former.name}."
        return hint + format_siblings(self)

    def write_file(self, name: str, parts: Iterable[Any]) -> None:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())

    def move_to(self, destination: LocalStorage) -> None:
        destination.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.rename(destination.path)
        fsync_directory(self.path.parent)

    def remove(self) -> None:
        doomed = self.path.with_name(f"{self.name}.deleting")
        shutil.rmtree(doomed, ignore_errors=True)
        self.path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _raise(error: OSError) -> None:
    raise error


def fsync_directory(directory: Path) -> None:
    """Bring the entries of a directory to disk, where the system can."""
    try:
        handle = os.open(directory, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def list_step_checkpoints(storage: Storage) -> list[tuple[int, Storage]]:
    """List step and place of the checkpoints in a folder, valid or not, the newest first. Raises OSError."""
    found = [
        (int(match[1]), storage.child(name))
        for name in storage.list_children()
        if (match := STEP_PATTERN.fullmatch(name))
    ]
    return sorted(found, key=lambda each: (each[0], each[1].name), reverse=True)


def to_path_or_url(storage: StorageReader) -> Path | str:
    """Return the path of a directory, and the name of any other place."""
    return storage.path if isinstance(storage, LocalStorage) else str(storage)


def format_siblings(storage: Storage) -> str:
    """Name the checkpoints next to this one, for the end of a message."""
    try:
        names = [place.name for _, place in list_step_checkpoints(storage.parent) if place.name != storage.name]
    except OSError:
        return ""
    return f" Others beside it: {', '.join(names[:5])}." if names else ""


def retry(operation: Callable[[], T], options: StorageOptions, description: str) -> T:
    """Call `operation`, and call it again after a temporary error, up to `access.retries` times.

    `description` is done, in the warnings. Raises the OSError of the last attempt.
    """
    for attempt in range(options.max_retries):
        try:
            return operation()
        except OSError as error:
            if not isinstance(error, ConnectionError | TimeoutError) and error.errno not in _TRANSIENT:
                raise
            # Random, so that ranks do not come back together; not by the generators of training.
            longest = min(INITIAL_BACKOFF_S * 2**attempt, MAX_BACKOFF_S)
            wait_s = longest * random.SystemRandom().uniform(0.5, 1.0)
            again = f"Trying again in {wait_s:.1f} s ({attempt + 1} of {options.max_retries})."
            warn(f"{description} failed: {error}. {again}", stacklevel=2)
            time.sleep(wait_s)
    return operation()


class SeekableReader(io.RawIOBase):
    """A file for reading that keeps its own position. Subclasses define `_size` and `_read_at`."""

    def __init__(self, name: str) -> None:
        self.name, self._position = name, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence == os.SEEK_END:
            offset += self._size()
        self._position = offset + (self._position if whence == os.SEEK_CUR else 0)
        return self._position

    def readinto(self, buffer: Any) -> int:
        count = self._read_at(self._position, memoryview(buffer).cast("B"))
        self._position += count
        return count

    def _size(self) -> int:
        raise NotImplementedError

    def _read_at(self, position: int, buffer: memoryview) -> int:
        """Read at most as much as the buffer holds; return the number of bytes, 0 at the end."""
        raise NotImplementedError


def open_with_retry(open_file: Callable[[], BinaryIO], options: StorageOptions, name: str) -> BinaryIO:
    """Open a file for reading that is reopened after temporary errors, at the position that was reached."""
    return io.BufferedReader(_RetryingReader(open_file, options, name))


class _RetryingReader(SeekableReader):
    def __init__(self, open_file: Callable[[], BinaryIO], options: StorageOptions, name: str) -> None:
        super().__init__(name)
        self._open_file, self._options = open_file, options
        self._file: BinaryIO | None = None
        self._retry(self._open)

    def _size(self) -> int:
        return self._retry(lambda: self._open().seek(0, os.SEEK_END))

    def _read_at(self, position: int, buffer: memoryview) -> int:
        def read() -> int:
            file = self._open()
            file.seek(position)
            return int(file.readinto(buffer) or 0)  # type: ignore[attr-defined]

        return self._retry(read)

    def close(self) -> None:
        self._close_file()
        super().close()

    def _retry(self, work: Callable[[], T]) -> T:
        def attempt() -> T:
            try:
                return work()
            except OSError:
                self._close_file()
                raise

        return retry(attempt, self._options, f"reading {self.name}")

    def _open(self) -> BinaryIO:
        if self._file is None:
            self._file = self._open_file()
        return self._file

    def _close_file(self) -> None:
        file, self._file = self._file, None
        # A file that has failed before may fail to close.
        with suppress(OSError):
            if file is not None:
                file.close()

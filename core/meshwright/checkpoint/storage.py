"""Storage of checkpoints: local directories, URLs, or anything else that lists and opens files. And their signing keys.

[Note: storage] A `StorageReader` lists its files with their sizes and opens them. Reading, verifying and exporting a
checkpoint need no more, so they work the same for directories, object stores and memory. A `Storage` can also hold
other storages and be written to. See docs/decisions/0027-places-of-checkpoints.md.

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
"""Matches the name of a checkpoint of a run."""
INITIAL_BACKOFF_S, MAX_BACKOFF_S = 0.5, 30.0
MIN_KEY_BYTES = 32
"""Minimum size of a signing key."""
# Errors that may be temporary, unlike a full or read-only disk.
_TRANSIENT = frozenset(
    {
        *(errno.EIO, errno.EAGAIN, errno.ESTALE, errno.ETIMEDOUT, errno.EBUSY, errno.EINTR),
        *(errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED, errno.EPIPE, errno.EHOSTUNREACH, errno.ENETUNREACH),
    }
)


class SigningKey:
    """A secret of at least 32 bytes that signs manifests. It is never printed or sent.

    The signature is an HMAC-SHA256 of format version and checksum. The manifest holds checksums of all files and of
    itself, so the signature covers every byte.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def __repr__(self) -> str:
        return "SigningKey(...)"

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
        expected = self.sign(version, checksum)
        return isinstance(signature, str) and hmac.compare_digest(expected.encode(), signature.encode())

    def _compute_hmac(self, text: bytes) -> bytes:
        return hmac.new(self._secret, text, hashlib.sha256).digest()


def read_signing_key(path: str | Path, *, where: str) -> SigningKey:
    """Read a key, which is the full content of a file. `where` names the setting in errors. Raises ConfigError."""
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
            f"{MIN_KEY_BYTES}. {make_one}"
        )
    return SigningKey(secret)


@dataclass(frozen=True)
class StorageOptions:
    """Options for access to storage.

    Attributes:
        key: signs manifests that are written and verifies those that are read. None: signatures are neither made nor
            checked.
        max_retries: further attempts after a temporary error.
    """

    key: SigningKey | None = None
    max_retries: int = 3


DEFAULT_OPTIONS = StorageOptions()


class StorageReader(Protocol):
    """A checkpoint that can be read. `str()` gives its name in messages. See [Note: storage]."""

    @property
    def name(self) -> str:
        """Last component of the name, such as "step-00000100"."""

    @property
    def options(self) -> StorageOptions: ...

    def list_file_sizes(self) -> dict[str, int] | None:
        """Return size [bytes] by POSIX path for all files; None if the storage does not exist. Raises OSError."""

    def open(self, name: str) -> BinaryIO:
        """Open a file for `seek`, `read` and `readinto`. Raises OSError."""

    def format_hint(self) -> str:
        """Return sentences that help a user whose checkpoint is incomplete, after a leading space; or ""."""


class Storage(StorageReader, Protocol):
    """A storage that can hold other storages and be written to."""

    def child(self, name: str) -> Storage:
        """Return the storage of this name within this one; it need not exist."""

    def list_children(self) -> list[str]:
        """List the names of the storages within this one; empty if it does not exist. Raises OSError."""

    @property
    def parent(self) -> Storage: ...

    def is_same_as(self, other: StorageReader) -> bool:
        """Return whether both names refer to the same location."""

    def write_file(self, name: str, parts: Iterable[Any]) -> None:
        """Write a file from its parts. The file is durable on return. Raises OSError."""

    def move_to(self, destination: Any) -> None:
        """Move this checkpoint to another storage of the same kind. Raises OSError."""

    def remove(self) -> None:
        """Remove this checkpoint; no part of it stays visible under its name. Raises OSError."""


StorageLike: TypeAlias = str | Path | StorageReader
"""A checkpoint: its path, its URL, or its storage."""


@dataclass(frozen=True)
class LocalStorage:
    """A directory of a local or mounted file system."""

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
            # Follow links to files, as in the Hub's cache, but not links to directories, which may form a cycle.
            walked = os.walk(self.path, onerror=_raise)
            paths = [Path(directory, name) for directory, _, names in walked for name in names]
            return {path.relative_to(self.path).as_posix(): path.stat().st_size for path in paths if path.is_file()}

        return retry(sizes, self.options, f"reading {self}")

    def open(self, name: str) -> BinaryIO:
        path = self.path / name
        return open_with_retry(lambda: open_regular_file(path, buffering=0), self.options, str(path))

    def format_hint(self) -> str:
        replaced, hint = self.path.with_name(f"{self.name}.replaced"), ""
        if replaced.is_dir() and not self.path.exists():
            hint = f" A save over it was interrupted: its former contents are {replaced.name}."
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
        deleting = self.path.with_name(f"{self.name}.deleting")
        shutil.rmtree(deleting, ignore_errors=True)
        self.path.rename(deleting)
        shutil.rmtree(deleting, ignore_errors=True)


def _raise(error: OSError) -> None:
    raise error


def fsync_directory(directory: Path) -> None:
    """Flush the entries of a directory to disk, if the system can."""
    try:
        handle = os.open(directory, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def list_step_checkpoints(storage: Storage) -> list[tuple[int, Storage]]:
    """List step and storage of the checkpoints in a directory, valid or not, newest first. Raises OSError."""
    checkpoints = [
        (int(match[1]), storage.child(name))
        for name in storage.list_children()
        if (match := STEP_PATTERN.fullmatch(name))
    ]
    return sorted(checkpoints, key=lambda each: (each[0], each[1].name), reverse=True)


def to_path_or_url(storage: StorageReader) -> Path | str:
    """Return the path of a local directory, or the name of any other storage."""
    return storage.path if isinstance(storage, LocalStorage) else str(storage)


def format_siblings(storage: Storage) -> str:
    """Return a sentence that names the checkpoints next to this one, or ""."""
    try:
        names = [sibling.name for _, sibling in list_step_checkpoints(storage.parent) if sibling.name != storage.name]
    except OSError:
        return ""
    return f" Others there: {', '.join(names[:5])}." if names else ""


def retry(operation: Callable[[], T], options: StorageOptions, description: str) -> T:
    """Call `operation`, and repeat it after a temporary error up to `options.max_retries` times.

    `description` names the operation in warnings. Raises the OSError of the last attempt.
    """
    for attempt in range(options.max_retries):
        try:
            return operation()
        except OSError as error:
            if not isinstance(error, ConnectionError | TimeoutError) and error.errno not in _TRANSIENT:
                raise
            # Jitter, so that ranks do not retry at the same time. The generators of training are not used.
            max_wait_s = min(INITIAL_BACKOFF_S * 2**attempt, MAX_BACKOFF_S)
            wait_s = max_wait_s * random.SystemRandom().uniform(0.5, 1.0)
            retry_text = f"Trying again in {wait_s:.1f} s ({attempt + 1} of {options.max_retries})."
            warn(f"{description} failed: {error}. {retry_text}", stacklevel=2)
            time.sleep(wait_s)
    return operation()


class SeekableReader(io.RawIOBase):
    """A read-only file that keeps its own position. Subclasses implement `_size` and `_read_at`."""

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
        """Read at most as many bytes as the buffer holds; return the number read, 0 at the end."""
        raise NotImplementedError


def open_with_retry(open_file: Callable[[], BinaryIO], options: StorageOptions, name: str) -> BinaryIO:
    """Open a file for reading. After a temporary error it is reopened at the same position."""
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
        # A file that failed before may fail to close.
        with suppress(OSError):
            if file is not None:
                file.close()

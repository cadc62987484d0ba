"""Open the storage of a path or URL. Object stores, such as s3://bucket/prefix, are accessed through fsspec.

Object stores have no rename, and a file appears only when it is complete. Credentials and endpoints come from the
environment and from the configuration files of fsspec's packages. A run file holds no secret. See
docs/reference/storage.md. Source: fsspec.spec.AbstractFileSystem.
"""

from __future__ import annotations

import errno
import importlib
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, overload

from ..base.errors import ConfigError, suggest_match
from .storage import (
    DEFAULT_OPTIONS,
    LocalStorage,
    Storage,
    StorageOptions,
    StorageReader,
    format_siblings,
    open_with_retry,
    retry,
)

T = TypeVar("T")

READ_AHEAD_BYTES = 8_000_000
# Chained URLs, such as "simplecache::s3://bucket", match as well and are rejected later.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*(::.*)?://", re.DOTALL)
_MANIFEST_SUFFIX = "/checkpoint.json"
# Extra of this distribution that installs the package for a protocol.
_EXTRAS = {"s3": "s3", "s3a": "s3"}
PROTOCOLS = ("file", "local", "memory", "s3", "s3a", "gs", "gcs", "abfs", "az", "hf")
"""Allowed URL protocols. Others are unsafe: older fsspec versions execute the content of a `reference://` file."""


def is_url(location: object) -> bool:
    """Return whether `location` is a URL, such as "s3://bucket/prefix"."""
    return isinstance(location, str) and _URL.match(location) is not None


@overload
def open_storage(location: str | Path | Storage, options: StorageOptions = ...) -> Storage: ...
@overload
def open_storage(location: str | Path | StorageReader, options: StorageOptions = ...) -> StorageReader: ...
def open_storage(location: str | Path | StorageReader, options: StorageOptions = DEFAULT_OPTIONS) -> StorageReader:
    """Return the storage of a path or URL; a storage is returned unchanged. Raises ConfigError."""
    if is_url(location):
        return _open_url(str(location), options)
    return LocalStorage(Path(location), options) if isinstance(location, str | Path) else location


def _open_url(url: str, options: StorageOptions) -> Storage:
    protocol, _, rest = url.partition("://")
    _refuse_chains(url)
    if "@" in rest.partition("/")[0] and ":" in rest.partition("@")[0]:
        raise ConfigError(
            f"a URL of {protocol} holds a password, which would be written with the run file. Leave it out: packages "
            f"of fsspec take it from the environment, or from their own files."
        )
    if protocol not in PROTOCOLS:
        raise ConfigError(
            f"{url!r} is of a kind of URL that is not opened: {protocol!r}.{suggest_match(protocol, PROTOCOLS)} "
            f"Allowed: {', '.join(PROTOCOLS)}; a path without :// is a directory."
        )
    if protocol in ("file", "local"):
        return LocalStorage(Path(rest), options)
    _check_installed(url, protocol)
    if not rest.strip("/"):
        raise ConfigError(f"{url!r} names no place. Give a bucket and a prefix, such as {protocol}://bucket/prefix.")
    return RemoteStorage(f"{protocol}://{rest.rstrip('/')}", options)


def _refuse_chains(url: str) -> None:
    if "::" in url:
        raise ConfigError(f"{url!r} is a chain of URLs, which is not opened. Give one without '::'.")


def _check_installed(url: str, protocol: str) -> None:
    try:
        fsspec = importlib.import_module("fsspec")
    except ImportError as error:
        raise ConfigError(
            f"{url!r} needs the package fsspec, which cannot be imported ({error}). Install it: pip install -e "
            f"'.[{_EXTRAS.get(protocol, 'remote')}]' in a clone."
        ) from None
    try:
        fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        extra = _EXTRAS.get(protocol)
        remedy = f"pip install -e '.[{extra}]' in a clone." if extra else str(error).rstrip(".") + "."
        raise ConfigError(f"{url!r} needs a package that is not installed: {remedy}") from None


@dataclass(frozen=True)
class RemoteStorage:
    """A prefix of an object store."""

    url: str
    options: StorageOptions = DEFAULT_OPTIONS

    def __post_init__(self) -> None:
        # A name listed by the server could form a chained URL.
        _refuse_chains(self.url)

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> RemoteStorage:
        return RemoteStorage(self.url.rpartition("/")[0], self.options)

    def child(self, name: str) -> RemoteStorage:
        return RemoteStorage(f"{self.url}/{name}", self.options)

    def is_same_as(self, other: StorageReader) -> bool:
        return isinstance(other, RemoteStorage) and self.url == other.url

    def format_hint(self) -> str:
        return format_siblings(self)

    def list_children(self) -> list[str]:
        def names() -> list[str]:
            filesystem, path = self._open_filesystem()
            try:
                entries = filesystem.ls(path, detail=True)
            except FileNotFoundError:
                # A new run has no such prefix yet; `find` raises if the bucket is missing.
                filesystem.find(path)
                return []
            names = (each["name"].rstrip("/").rpartition("/")[2] for each in entries if each["type"] == "directory")
            return [name for name in names if name != self.name]

        return self._retry(names, "reading")

    def list_file_sizes(self) -> dict[str, int] | None:
        def sizes() -> dict[str, int] | None:
            filesystem, path = self._open_filesystem()
            entries = filesystem.find(path, detail=True)
            start = len(path.strip("/")) + 1
            return {name.strip("/")[start:]: int(each["size"]) for name, each in entries.items()} or None

        return self._retry(sizes, "reading")

    def open(self, name: str) -> BinaryIO:
        def open_file() -> Any:
            return _RemoteFile(self._open(name, "rb", block_size=READ_AHEAD_BYTES))

        return open_with_retry(open_file, self.options, f"{self}/{name}")

    def write_file(self, name: str, parts: Iterable[Any]) -> None:
        file = self._open(name, "wb")
        try:
            for part in parts:
                with _convert_to_os_errors():
                    file.write(part)
        except BaseException:
            # Closing the file would publish it.
            with suppress(Exception):
                file.discard()
            file.closed = True
            raise
        with _convert_to_os_errors():
            file.close()

    def remove(self) -> None:
        """Remove all files below this prefix, manifests first."""

        def remove() -> None:
            """Remove all files under this prefix, manifests first."""
            filesystem, path = self._open_filesystem()
            paths = filesystem.find(path)
            for each in paths:
                if each.endswith(_MANIFEST_SUFFIX):
                    filesystem.rm_file(each)
            if paths:
                with suppress(FileNotFoundError):
                    filesystem.rm(path, recursive=True)

        self._retry(remove, "removing")

    def move_to(self, destination: RemoteStorage) -> None:
        """Copy all files under this prefix, manifests last, and then remove them here."""

        def copy() -> None:
            filesystem, path = self._open_filesystem()
            _, target = destination._open_filesystem()
            for each in sorted(filesystem.find(path), key=lambda name: name.endswith(_MANIFEST_SUFFIX)):
                filesystem.cp_file(each, f"{target}/{each.strip('/')[len(path.strip('/')) + 1 :]}")

        self._retry(copy, "moving")
        self.remove()

    def _open(self, name: str, mode: str, **options: Any) -> Any:
        with _convert_to_os_errors():
            filesystem, path = self._open_filesystem()
            return filesystem.open(f"{path}/{name}", mode, **options)

    def _open_filesystem(self) -> tuple[Any, str]:
        """Return the file system and the path in it. The listing cache is dropped, since other processes write."""
        filesystem, path = importlib.import_module("fsspec.core").url_to_fs(self.url)
        filesystem.invalidate_cache()
        if loop := getattr(filesystem, "loop", None):
            loop.set_exception_handler(_ignore_os_errors)
        return filesystem, path

    def _retry(self, work: Callable[[], T], what: str) -> T:
        def attempt() -> T:
            with _convert_to_os_errors():
                return work()

        return retry(attempt, self.options, f"{what} {self}")


def _ignore_os_errors(loop: Any, context: dict[str, Any]) -> None:
    """Ignore the further tasks that a broken connection fails; the client reports the error of the one it awaits."""
    if not isinstance(context.get("exception"), OSError):
        loop.default_exception_handler(context)


class _RemoteFile:
    """An fsspec file that raises only OSErrors."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def seek(self, offset: int, whence: int = 0) -> int:
        with _convert_to_os_errors():
            return int(self._file.seek(offset, whence))

    def readinto(self, buffer: Any) -> int:
        with _convert_to_os_errors():
            return int(self._file.readinto(buffer))

    def close(self) -> None:
        with _convert_to_os_errors():
            self._file.close()


@contextmanager
def _convert_to_os_errors() -> Iterator[None]:
    """Convert package-specific errors of failing servers to OSErrors."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}") from error

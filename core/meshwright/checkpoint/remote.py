"""Places behind a URL, such as s3://bucket/prefix, by fsspec: object stores, where nothing is renamed, and a file
appears when it is whole.

Who may go where, and which server is meant, fsspec's packages take from the environment and from their own files of
settings, as other programs do: no secret is in a run file. See docs/storage.md.
Source: fsspec.spec.AbstractFileSystem.
"""

from __future__ import annotations

import errno
import importlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ..base.errors import ConfigError, nearest
from .places import DEFAULT, Access, Folder, LocalFolder, Place, others_of, retried, steady

READ_AHEAD_BYTES = 8_000_000
_MANIFEST = "checkpoint.json"
_EXTRAS = {"s3": "s3", "s3a": "s3"}
"""Extras of this distribution that have what a kind of URL needs."""
PROTOCOLS = ("file", "local", "memory", "s3", "s3a", "gs", "gcs", "abfs", "az", "hf")
"""Kinds of URLs that are opened. fsspec has others that read a file in the place of a server: of `reference://`, older
versions run what is in it."""


def remote_folder(url: str, access: Access) -> Folder:
    """The place that a URL names.

    Raises:
        ConfigError: that kind of URL is not opened, or a package is not installed.
    """
    protocol, rest = _checked(url)
    if protocol in ("file", "local"):
        return LocalFolder(Path(rest), access)
    _file_system_class(url, protocol)
    if not rest.strip("/"):
        raise ConfigError(f"{url!r} names no place. Give a bucket and a prefix, such as {protocol}://bucket/prefix.")
    return RemoteFolder(f"{protocol}://{rest.rstrip('/')}", access)


def _checked(url: str) -> tuple[str, str]:
    """Kind and place of a URL that may be opened.

    Raises:
        ConfigError: it chains several, or is of another kind.
    """
    protocol, _, rest = url.partition("://")
    _refuse_chains(url)
    if "@" in rest.partition("/")[0] and ":" in rest.partition("@")[0]:
        raise ConfigError(
            f"a URL of {protocol} holds a password, which would be written with the run file. Leave it out: packages "
            f"of fsspec take it from the environment, or from their own files."
        )
    if protocol not in PROTOCOLS:
        raise ConfigError(
            f"{url!r} is of a kind of URL that is not opened: {protocol!r}.{nearest(protocol, PROTOCOLS)} Allowed: "
            f"{', '.join(PROTOCOLS)}; a path without :// is a directory."
        )
    return protocol, rest


def _refuse_chains(url: str) -> None:
    if "::" in url:
        raise ConfigError(f"{url!r} is a chain of URLs, which is not opened. Give one without '::'.")


def _file_system_class(url: str, protocol: str) -> Any:
    try:
        fsspec = importlib.import_module("fsspec")
    except ImportError as error:
        raise ConfigError(
            f"{url!r} needs the package fsspec, which cannot be imported ({error}). Install it: pip install -e "
            f"'.[{_EXTRAS.get(protocol, 'remote')}]' in a clone."
        ) from None
    try:
        return fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        extra = _EXTRAS.get(protocol)
        remedy = f"pip install -e '.[{extra}]' in a clone." if extra else str(error).rstrip(".") + "."
        raise ConfigError(f"{url!r} needs a package that is not installed: {remedy}") from None


@dataclass(frozen=True)
class RemoteFolder:
    """A prefix of an object store."""

    url: str
    access: Access = DEFAULT

    def __post_init__(self) -> None:
        # Names that a server lists are added to it.
        _refuse_chains(self.url)

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> RemoteFolder:
        return RemoteFolder(self.url.rpartition("/")[0], self.access)

    def at(self, name: str) -> RemoteFolder:
        return RemoteFolder(f"{self.url}/{name}", self.access)

    def is_same(self, other: Place) -> bool:
        return isinstance(other, RemoteFolder) and self.url == other.url

    # -- read

    def names(self) -> list[str]:
        return self._retried(self._names, "reading")

    def _names(self) -> list[str]:
        files, path = self._opened()
        try:
            found = files.ls(path, detail=True)
        except FileNotFoundError:
            # No such prefix, as of a run that begins; this raises where there is no such bucket.
            files.find(path)
            return []
        names = (each["name"].rstrip("/").rpartition("/")[2] for each in found if each["type"] == "directory")
        return [name for name in names if name != self.name]

    def sizes(self) -> dict[str, int] | None:
        return self._retried(self._sizes, "reading")

    def _sizes(self) -> dict[str, int] | None:
        files, path = self._opened()
        found = files.find(path, detail=True)
        start = len(path.strip("/")) + 1
        return {name.strip("/")[start:]: int(each["size"]) for name, each in found.items()} or None

    def open(self, name: str) -> BinaryIO:
        def open_it() -> BinaryIO:
            with _as_os_errors():
                files, path = self._opened()
                return _File(files.open(f"{path}/{name}", "rb", block_size=READ_AHEAD_BYTES))  # type: ignore[return-value]

        return steady(open_it, self.access, f"{self}/{name}")

    def hint(self) -> str:
        return others_of(self)

    # -- write; where something fails, it is told by an OSError, and what is there of it is of no checkpoint

    def put(self, name: str, parts: Iterable[Any]) -> None:
        """Write a file, which appears when it is whole."""
        with _as_os_errors():
            files, path = self._opened()
            file = files.open(f"{path}/{name}", "wb")
        try:
            for part in parts:
                with _as_os_errors():
                    file.write(part)
        except BaseException:
            # Closing it would make it appear.
            with suppress(Exception):
                file.discard()
            file.closed = True
            raise
        with _as_os_errors():
            file.close()

    def remove(self) -> None:
        """Remove what is below this prefix, manifests first."""

        def remove() -> None:
            files, path = self._opened()
            found = files.find(path)
            for each in found:
                if each.endswith(f"/{_MANIFEST}"):
                    files.rm_file(each)
            if found:
                with suppress(FileNotFoundError):
                    files.rm(path, recursive=True)

        self._retried(remove, "removing")

    def move(self, to: RemoteFolder) -> None:
        """Copy what is below this prefix, manifests last, and remove it here."""

        def copy() -> None:
            files, path = self._opened()
            _, target = to._opened()
            for each in sorted(files.find(path), key=lambda name: name.endswith(f"/{_MANIFEST}")):
                files.cp_file(each, f"{target}/{each.strip('/')[len(path.strip('/')) + 1 :]}")

        self._retried(copy, "moving")
        self.remove()

    def _opened(self) -> tuple[Any, str]:
        """The file system, and the path there. What it remembers of other processes' files is out of date."""
        files, path = importlib.import_module("fsspec.core").url_to_fs(self.url)
        files.invalidate_cache()
        if loop := getattr(files, "loop", None):
            loop.set_exception_handler(_passed_over)
        return files, path

    def _retried(self, work: Any, what: str) -> Any:
        def attempt() -> Any:
            with _as_os_errors():
                return work()

        return retried(attempt, self.access, f"{what} {self}")


def _passed_over(loop: Any, context: dict[str, Any]) -> None:
    """A connection that breaks fails several tasks of a client, of which it waits for one. That one is told of."""
    if not isinstance(context.get("exception"), OSError):
        loop.default_exception_handler(context)


class _File:
    """A file of fsspec, whose errors are those of a system."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def seek(self, offset: int, whence: int = 0) -> int:
        with _as_os_errors():
            return int(self._file.seek(offset, whence))

    def readinto(self, buffer: Any) -> int:
        with _as_os_errors():
            return int(self._file.readinto(buffer))

    def close(self) -> None:
        with _as_os_errors():
            self._file.close()


@contextmanager
def _as_os_errors() -> Iterator[None]:
    """Each package has errors of its own for a server that does not answer, and for one that answers nonsense."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}") from error

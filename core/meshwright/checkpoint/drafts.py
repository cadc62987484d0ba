"""A checkpoint while it is written, in a directory or elsewhere; and the places of a run, tidied up.

Where there are directories, [Note: complete or absent] in `directory` says how a checkpoint gets its name. Object
stores have no rename: there it is complete when its manifest is there, which is written last and removed first.

A file is written anew, from its first byte, where writing it has failed in a way that may be gone a moment later: what
a file system has lost when it could not bring it to disk, it does not tell twice.

This module imports no torch.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ..base.errors import CheckpointWriteError
from . import directory
from .directory import ABANDONED, refuse_foreign, set_aside
from .manifest import MANIFEST, PAYLOAD, Manifest, StoredFile, beside, sealed
from .places import STEP, Folder, LocalFolder, retried, steps_of
from .remote import RemoteFolder
from .signed_reading import Chunks

Parts = Callable[[], Iterable[Any]]
"""Makes the bytes of a file, part by part, as often as it is written."""


class Draft(Protocol):
    """A checkpoint that is being written. The first rank begins, and commits or discards; all ranks write."""

    def begin(self) -> None:
        """Make room for it. CheckpointWriteError: there can be none, or something foreign is in the way."""

    def write(self, name: str, parts: Parts) -> StoredFile:
        """Write a file, and have it stored when this returns. OSError: it cannot be."""

    def commit(self, manifest: Manifest) -> None:
        """Complete it. OSError: it is not; what it would have replaced is as it was, or is mended at the next start."""

    def discard(self) -> None:
        """Remove what could not be completed, as far as that can be."""


def draft_of(folder: Folder) -> Draft:
    """A checkpoint to be written at a place."""
    if isinstance(folder, LocalFolder):
        return LocalDraft(folder)
    if isinstance(folder, RemoteFolder):
        return RemoteDraft(folder)
    raise CheckpointWriteError(f"{folder} can be read, but not be written to. Name a directory or a URL.")


class _Counted:
    """Parts of a file on their way, and what they were."""

    def __init__(self, parts: Parts, *, in_chunks: bool) -> None:
        self._parts, self._digest, self._size = parts, hashlib.sha256(), 0
        self._chunks = Chunks() if in_chunks else None

    def __iter__(self) -> Iterator[Any]:
        for part in self._parts():
            yield part
            self._digest.update(part)
            self._size += memoryview(part).nbytes
            if self._chunks is not None:
                self._chunks.update(part)

    def stored(self) -> StoredFile:
        return StoredFile(self._size, self._digest.hexdigest(), self._chunks.digests() if self._chunks else ())


def _counted(name: str, parts: Parts, folder: Folder) -> _Counted:
    """With checksums of chunks, where what is read in part is signed."""
    return _Counted(parts, in_chunks=folder.access.key is not None and name.startswith(PAYLOAD))


@dataclass(frozen=True)
class LocalDraft:
    """One in a directory."""

    folder: LocalFolder

    @property
    def _writing(self) -> Path:
        return beside(self.folder.path, "writing")

    def begin(self) -> None:
        directory.begin(self.folder.path, self.folder.access)

    def write(self, name: str, parts: Parts) -> StoredFile:
        path = self._writing / name

        def write() -> StoredFile:
            counted = _counted(name, parts, self.folder)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                for part in counted:
                    file.write(part)
                file.flush()
                os.fsync(file.fileno())
            return counted.stored()

        return retried(write, self.folder.access, f"writing {path}")

    def commit(self, manifest: Manifest) -> None:
        directory.commit(self._writing, self.folder.path, manifest, self.folder.access)

    def discard(self) -> None:
        directory.discard(self._writing)


@dataclass(frozen=True)
class RemoteDraft:
    """One behind a URL."""

    folder: RemoteFolder

    def begin(self) -> None:
        refuse_foreign(self.folder)
        try:
            self.folder.remove()
        except OSError as error:
            raise CheckpointWriteError(f"the checkpoint {self.folder} cannot be written: {error}.") from error

    def write(self, name: str, parts: Parts) -> StoredFile:
        def write() -> StoredFile:
            counted = _counted(name, parts, self.folder)
            self.folder.put(name, counted)
            return counted.stored()

        return retried(write, self.folder.access, f"writing {self.folder}/{name}")

    def commit(self, manifest: Manifest) -> None:
        sizes = self.folder.sizes() or {}
        for name, stored in manifest.files.items():
            if sizes.get(name) != stored.size:
                raise OSError(f"{self.folder}/{name} has {sizes.get(name)} bytes there, and {stored.size} were written")
        text = sealed(manifest, self.folder.access.key).encode()
        retried(lambda: self.folder.put(MANIFEST, [text]), self.folder.access, f"writing {self.folder}/{MANIFEST}")

    def discard(self) -> None:
        try:
            self.folder.remove()
        except OSError:
            # Without a manifest it is none; the next start removes it.
            return


# -- the places of a run


def tidy(root: Folder) -> None:
    """Remove what interrupted runs have left half written or half removed; only for who writes there.

    Raises:
        CheckpointWriteError: it cannot be done.
    """
    if isinstance(root, LocalFolder):
        directory.remove_leftovers(root.path, root.access)
        return
    try:
        for _, place in steps_of(root):
            if MANIFEST not in (place.sizes() or {}):
                place.remove()
    except OSError as error:
        raise CheckpointWriteError(f"what a run has left in {root} cannot be removed: {error}.") from error


def move_aside(root: Folder, *, after: int, copies: Sequence[Path] = ()) -> Folder | None:
    """Move the checkpoints of later steps to a new place in `root`; see `directory.set_aside`.

    Raises:
        CheckpointWriteError: they cannot be moved; those that could be are there.
    """
    if isinstance(root, LocalFolder):
        moved = set_aside(root.path, after=after, copies=copies)
        return None if moved is None else LocalFolder(moved, root.access)
    if not isinstance(root, RemoteFolder):
        raise CheckpointWriteError(f"{root} cannot be written to. Name a directory or a URL.")
    try:
        later = [place.name for step, place in steps_of(root) if step > after]
        if not later:
            return None
        numbers = [int(match[1]) for name in root.names() if (match := ABANDONED.fullmatch(name))]
        aside = root.at(f"abandoned-{max(numbers, default=0) + 1}")
        for file in copies:
            if file.is_file():
                aside.put(file.name, [file.read_bytes()])
        for name in later:
            root.at(name).move(aside.at(name))
    except OSError as error:
        raise CheckpointWriteError(f"checkpoints of later steps in {root} cannot be moved: {error}.") from error
    return aside


def remove_all(root: Folder) -> None:
    """Remove what a run has saved in a place that it shares with nothing else; for a run that is to begin anew.

    Raises:
        CheckpointWriteError: it cannot be removed.
    """
    try:
        for name in root.names():
            if STEP.fullmatch(name) or ABANDONED.fullmatch(name):
                root.at(name).remove()
    except OSError as error:
        raise CheckpointWriteError(f"the checkpoints in {root} cannot be removed: {error}.") from error

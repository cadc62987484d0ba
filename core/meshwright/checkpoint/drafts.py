"""A checkpoint while it is written, in a directory or an object store.

[Note: complete or absent] A checkpoint is written into `NAME.writing`. When all files are on disk, the manifest, with
the size and checksum of each, is added and the directory is renamed to NAME. So a directory of that name was complete
once. If it lost or changed something since, its manifest shows it, and it is never loaded. The manifest holds its own
checksum and must be exactly what `json.dumps` writes. Files that it does not name are never read. Object stores have no
rename: there a checkpoint is complete when it has a manifest, which is written last and removed first.

[Note: swap, then remove] A checkpoint that is replaced is renamed to `NAME.replaced`, then the new one gets its name,
and then the old one is removed. After a crash in between, one of both is complete next to NAME, and `recover` renames
it. Readers do not: the writer may be alive.

After a temporary error a file is written again from its first byte, since a file system reports only once what it could
not bring to disk. This module imports no torch.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from ..base.errors import CheckpointError, CheckpointWriteError
from .keys import ForeignCheckpointError
from .manifest import MANIFEST, PAYLOAD, Manifest, StoredFile, beside, read_manifest, sealed
from .places import Folder, LocalFolder, Where, retried, sync
from .signed_reading import Chunks

Parts = Callable[[], Iterable[Any]]
"""Yields the bytes of a file, part by part; called for each attempt to write it."""


def draft_of(folder: Folder) -> Draft:
    """Return a checkpoint to be written at a place."""
    if isinstance(folder, LocalFolder):
        return LocalDraft(folder)
    if not hasattr(folder, "put"):
        raise CheckpointWriteError(f"{folder} can be read, but not be written to. Name a directory or a URL.")
    return Draft(folder)


class Draft:
    """A checkpoint that is being written, to an object store.

    The first rank calls `begin`, and `commit` or `discard`; all ranks call `write`.

    Args:
        folder: where the checkpoint will be.
        target: where its files are written; None: in `folder`.
    """

    def __init__(self, folder: Folder, target: Folder | None = None) -> None:
        self.folder, self.target = folder, target or folder

    def begin(self) -> None:
        """Make room for the checkpoint. Raises CheckpointWriteError."""
        refuse_foreign(self.folder)
        try:
            self.folder.remove()
        except OSError as error:
            raise CheckpointWriteError(f"the checkpoint {self.folder} cannot be written: {error}.") from error

    def write(self, name: str, parts: Parts) -> StoredFile:
        """Write a file, which is stored when this returns. Raises OSError."""
        in_chunks = self.folder.access.key is not None and name.startswith(PAYLOAD)

        def write() -> StoredFile:
            counted = _Counted(parts, in_chunks=in_chunks)
            self.target.put(name, counted)
            return counted.stored()

        return retried(write, self.folder.access, f"writing {self.target}/{name}")

    def commit(self, manifest: Manifest) -> None:
        """Complete the checkpoint. After an OSError one of that name is unchanged, or `recover` restores it."""
        sizes = self.folder.sizes() or {}
        for name, stored in manifest.files.items():
            if sizes.get(name) != stored.size:
                raise OSError(f"{self.folder}/{name} has {sizes.get(name)} bytes there, and {stored.size} were written")
        self._put_manifest(manifest)

    def _put_manifest(self, manifest: Manifest) -> None:
        text = sealed(manifest, self.folder.access.key).encode()
        retried(lambda: self.target.put(MANIFEST, [text]), self.folder.access, f"writing {self.target}/{MANIFEST}")

    def discard(self) -> None:
        """Remove what could not be completed, as far as possible."""
        try:
            self.folder.remove()
        except OSError:
            # Without a manifest it is not a checkpoint; the next start removes it.
            return


class LocalDraft(Draft):
    """A checkpoint that is being written to a directory; see [Note: complete or absent]."""

    def __init__(self, folder: LocalFolder) -> None:
        self.final, self.writing = folder.path, beside(folder.path, "writing")
        super().__init__(folder, LocalFolder(self.writing, folder.access))

    def begin(self) -> None:
        access, writing = self.folder.access, self.writing
        for path in (self.final, beside(self.final, "replaced"), writing):
            refuse_foreign(LocalFolder(path, access))
        try:
            recover(self.final)
            shutil.rmtree(writing, ignore_errors=True)
            if writing.is_symlink():
                raise CheckpointError(f"{writing} is a link, through which no checkpoint is written. Remove it.")
            retried(lambda: writing.mkdir(parents=True, exist_ok=True), access, f"making {writing}")
        except OSError as error:
            raise CheckpointWriteError(f"the checkpoint {self.final} cannot be written: {error}.") from error

    def commit(self, manifest: Manifest) -> None:
        self._put_manifest(manifest)
        for directory in {(self.writing / name).parent for name in (MANIFEST, *manifest.files)}:
            sync(directory)
        put_in_place(self.writing, self.final)

    def discard(self) -> None:
        shutil.rmtree(self.writing, ignore_errors=True)


class _Counted:
    """Parts of a file on their way to storage, and the checksums of what was written."""

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


def put_in_place(new: Path, final: Path) -> None:
    """Give a complete directory its name, replacing one of that name; see [Note: swap, then remove]."""
    old = beside(final, "replaced")
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    try:
        new.rename(final)
    except OSError:
        if old.exists():
            old.rename(final)
        raise
    sync(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def recover(final: Path) -> None:
    """Finish an interrupted `put_in_place`: the new checkpoint gets the name if it is complete, else the old one.

    Only the writer of the checkpoint may call this.
    """
    old, new = beside(final, "replaced"), beside(final, "writing")
    if old.exists() and not final.exists():
        (old if valid_manifest(new) is None else new).rename(final)


def valid_manifest(checkpoint: Where) -> Manifest | None:
    """Return the manifest; None if the checkpoint is incomplete, by the sizes of its files, or cannot be read."""
    try:
        return read_manifest(checkpoint)
    except CheckpointError:
        return None


def is_foreign(checkpoint: Where) -> bool:
    """Return whether there is a checkpoint that is not signed with the key of its place."""
    try:
        read_manifest(checkpoint)
    except ForeignCheckpointError:
        return True
    except CheckpointError:
        return False
    return False


def refuse_foreign(checkpoint: Where) -> None:
    if is_foreign(checkpoint):
        raise CheckpointWriteError(
            f"{checkpoint} is in the way, and it is not signed with the key of this run, which replaces no foreign "
            f"checkpoint. Move it away, or save elsewhere."
        )

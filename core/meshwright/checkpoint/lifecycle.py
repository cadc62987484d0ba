"""Lifecycle of a run's checkpoints: atomic writes, retention, archiving and removal.

[Note: complete or absent] A checkpoint is written to `NAME.writing`. When all files are on disk, the manifest, with the
size and checksum of each, is added and the directory is renamed to NAME. So a directory of that name was complete at
that time. If a file is lost or changed later, the manifest shows it, and the checkpoint is never loaded. The manifest
holds its own checksum and must be exactly what `json.dumps` writes. Files that it does not name are never read. Object
stores have no rename: there a checkpoint is complete when it has a manifest, which is written last and removed first.

[Note: swap, then remove] To replace a checkpoint, the old one is renamed to `NAME.replaced`, the new one is renamed to
NAME, and the old one is removed. After a crash in between, one of the two is complete next to NAME, and
`recover_interrupted_swap` renames it. Readers do not do so, because the writer may be alive.

After a temporary error a file is rewritten from its first byte, because a file system reports a failed flush only once.
This module imports no torch.
"""

from __future__ import annotations

import hashlib
import math
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from ..base.errors import CheckpointError, CheckpointWriteError
from .manifest import (
    MANIFEST_FILE,
    TEMPORARY_SUFFIXES,
    TENSORS_PREFIX,
    BlockHasher,
    CheckpointSignatureError,
    Manifest,
    StoredFile,
    list_checkpoints,
    read_manifest,
    serialize_manifest,
    sibling_path,
)
from .remote_storage import open_storage
from .storage import STEP_PATTERN, LocalStorage, Storage, StorageLike, fsync_directory, list_step_checkpoints, retry

CheckpointT = TypeVar("CheckpointT", bound=StorageLike)
ByteParts = Callable[[], Iterable[Any]]
"""Yields the bytes of a file in parts; called for each attempt to write it."""

HUGGING_FACE_FOLDER = "huggingface"
"""Directory in a checkpoint with the model's configuration and the tokenizer."""
EVALUATIONS_KEY = "evaluations"
"""Key of `Manifest.extra` with a checkpoint's losses by evaluation set."""
ARCHIVE_PATTERN = re.compile(r"abandoned-(\d+)")
"""Matches the name of a directory that `archive_after` creates."""


@contextmanager
def _convert_write_errors(failure: str) -> Iterator[None]:
    """Convert an OSError to a CheckpointWriteError that begins with `failure`."""
    try:
        yield
    except OSError as error:
        raise CheckpointWriteError(f"{failure}: {error}.") from error


def create_writer(storage: Storage) -> CheckpointWriter:
    """Return the writer of a new checkpoint. Raises CheckpointWriteError for a read-only storage."""
    if isinstance(storage, LocalStorage):
        return LocalCheckpointWriter(storage)
    if not hasattr(storage, "write_file"):
        raise CheckpointWriteError(f"{storage} can be read, but not be written to. Name a directory or a URL.")
    return CheckpointWriter(storage)


class CheckpointWriter:
    """Write one checkpoint to an object store.

    Rank 0 calls `prepare`, and `commit` or `discard`; all ranks call `write_file`. The files are written to `target`.
    """

    def __init__(self, storage: Storage, target: Storage | None = None) -> None:
        self.storage, self.target = storage, target or storage

    def prepare(self) -> None:
        """Remove what is stored under the checkpoint's name. Raises CheckpointWriteError."""
        _reject_wrong_signature(self.storage)
        with _convert_write_errors(f"the checkpoint {self.storage} cannot be written"):
            self.storage.remove()

    def write_file(self, name: str, parts: ByteParts) -> StoredFile:
        """Write a file, which is durable on return. Raises OSError."""
        in_chunks = self.storage.options.key is not None and name.startswith(TENSORS_PREFIX)

        def write() -> StoredFile:
            counted = _HashedParts(parts, in_blocks=in_chunks)
            self.target.write_file(name, counted)
            return counted.to_stored_file()

        return retry(write, self.storage.options, f"writing {self.target}/{name}")

    def commit(self, manifest: Manifest) -> None:
        """Complete the checkpoint. Raises OSError."""
        sizes = self.storage.list_file_sizes() or {}
        for name, stored in manifest.files.items():
            if sizes.get(name) != stored.size:
                raise OSError(
                    f"{self.storage}/{name} has {sizes.get(name)} bytes there, and {stored.size} were written"
                )
        self._write_manifest(manifest)

    def _write_manifest(self, manifest: Manifest) -> None:
        text = serialize_manifest(manifest, self.storage.options.key).encode()
        retry(
            lambda: self.target.write_file(MANIFEST_FILE, [text]),
            self.storage.options,
            f"writing {self.target}/{MANIFEST_FILE}",
        )

    def discard(self) -> None:
        """Remove the incomplete checkpoint as far as possible."""
        try:
            self.storage.remove()
        except OSError:
            # Without a manifest it is not a checkpoint; the next run removes it.
            return


class LocalCheckpointWriter(CheckpointWriter):
    """Write one checkpoint to a directory; see [Note: complete or absent]."""

    def __init__(self, storage: LocalStorage) -> None:
        self.final_path, self.temporary_path = storage.path, sibling_path(storage.path, "writing")
        super().__init__(storage, LocalStorage(self.temporary_path, storage.options))

    def prepare(self) -> None:
        options, temporary = self.storage.options, self.temporary_path
        for path in (self.final_path, sibling_path(self.final_path, "replaced"), temporary):
            _reject_wrong_signature(LocalStorage(path, options))
        with _convert_write_errors(f"the checkpoint {self.final_path} cannot be written"):
            recover_interrupted_swap(self.final_path)
            shutil.rmtree(temporary, ignore_errors=True)
            if temporary.is_symlink():
                raise CheckpointError(f"{temporary} is a link, through which no checkpoint is written. Remove it.")
            retry(lambda: temporary.mkdir(parents=True, exist_ok=True), options, f"making {temporary}")

    def commit(self, manifest: Manifest) -> None:
        """Complete the checkpoint. Raises OSError.

        After an error an existing checkpoint is unchanged, or `recover_interrupted_swap` restores it.
        """
        self._write_manifest(manifest)
        for directory in {(self.temporary_path / name).parent for name in (MANIFEST_FILE, *manifest.files)}:
            fsync_directory(directory)
        replace_directory(self.temporary_path, self.final_path)

    def discard(self) -> None:
        shutil.rmtree(self.temporary_path, ignore_errors=True)


class _HashedParts:
    """The parts of a file, and the checksums of those that were written."""

    def __init__(self, parts: ByteParts, *, in_blocks: bool) -> None:
        self._parts, self._digest, self._size = parts, hashlib.sha256(), 0
        self._chunks = BlockHasher() if in_blocks else None

    def __iter__(self) -> Iterator[Any]:
        for part in self._parts():
            yield part
            self._digest.update(part)
            self._size += memoryview(part).nbytes
            if self._chunks is not None:
                self._chunks.update(part)

    def to_stored_file(self) -> StoredFile:
        return StoredFile(self._size, self._digest.hexdigest(), self._chunks.digests() if self._chunks else ())


def replace_directory(new: Path, final: Path) -> None:
    """Rename a complete directory to `final`, replacing an existing one; see [Note: swap, then remove]."""
    old = sibling_path(final, "replaced")
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    try:
        new.rename(final)
    except OSError:
        if old.exists():
            old.rename(final)
        raise
    fsync_directory(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def recover_interrupted_swap(final: Path) -> None:
    """Finish an interrupted `replace_directory`; the new checkpoint gets the name if it is complete."""
    old, new = sibling_path(final, "replaced"), sibling_path(final, "writing")
    if old.exists() and not final.exists():
        (old if read_valid_manifest(new) is None else new).rename(final)


def read_valid_manifest(checkpoint: StorageLike) -> Manifest | None:
    """Return the manifest; None if the checkpoint cannot be read or is incomplete, judging by file sizes."""
    try:
        return read_manifest(checkpoint)
    except CheckpointError:
        return None


def _has_wrong_signature(checkpoint: StorageLike) -> bool:
    """Return whether a checkpoint exists that is not signed with the key of its storage."""
    try:
        read_manifest(checkpoint)
    except CheckpointError as error:
        return isinstance(error, CheckpointSignatureError)
    return False


def _reject_wrong_signature(checkpoint: StorageLike) -> None:
    if _has_wrong_signature(checkpoint):
        raise CheckpointWriteError(
            f"{checkpoint} is in the way, and it is not signed with the key of this run, which replaces no foreign "
            f"checkpoint. Move it away, or save elsewhere."
        )


def apply_retention(
    root: str | Path | Storage,
    *,
    newest_step: int,
    keep_last: int | None,
    keep_every: int | None = None,
    keep_best: int | None = None,
    eval_set: str = "",
) -> None:
    """Remove older checkpoints of a run; see `Checkpointer` for the options. Only valid ones are counted and removed.

    Checkpoints of steps after `newest_step`, the step saved last, are neither counted nor removed: they precede a
    rollback. Raises CheckpointError.
    """
    if keep_last is None:
        return
    checkpoints = [
        (int(checkpoint.name.rpartition("-")[2]), checkpoint) for checkpoint in list_checkpoints(open_storage(root))
    ]
    valid = [
        (step, checkpoint)
        for step, checkpoint in checkpoints
        if step <= newest_step and read_valid_manifest(checkpoint) is not None
    ]
    best = {
        step for _, step, _ in find_best_checkpoints([checkpoint for _, checkpoint in valid], eval_set, keep_best or 0)
    }
    kept = 0
    for step, checkpoint in valid:
        if kept >= keep_last and (step in best or (keep_every is not None and step % keep_every == 0)):
            continue
        kept += 1
        if kept > keep_last:
            with _convert_write_errors(f"the older checkpoint {checkpoint} cannot be removed"):
                checkpoint.remove()


def find_best_checkpoints(
    checkpoints: Sequence[CheckpointT], eval_set: str, count: int
) -> list[tuple[float, int, CheckpointT]]:
    """Return loss, step and storage of the checkpoints with the lowest finite losses, best first."""
    candidates = []
    for checkpoint in checkpoints if count else ():
        manifest = read_valid_manifest(checkpoint)
        losses = None if manifest is None else manifest.extra.get(EVALUATIONS_KEY)
        loss = losses.get(eval_set) if isinstance(losses, dict) else None
        if manifest is not None and isinstance(loss, int | float) and math.isfinite(loss):
            candidates.append((float(loss), manifest.step, checkpoint))
    return sorted(candidates, key=lambda each: each[:2])[:count]


def cleanup(root: Storage) -> None:
    """Remove incomplete checkpoints of interrupted runs. Only the writer of `root` may call this.

    Complete checkpoints that are not signed with the key of `root` stay. Raises CheckpointWriteError.
    """
    if isinstance(root, LocalStorage):
        _cleanup_directory(root)
        return
    with _convert_write_errors(f"what a run has left in {root} cannot be removed"):
        for _, checkpoint in list_step_checkpoints(root):
            if MANIFEST_FILE not in (checkpoint.list_file_sizes() or {}):
                checkpoint.remove()


def _cleanup_directory(root: LocalStorage) -> None:
    for path in root.path.glob("step-*.replaced"):
        with _convert_write_errors(f"{path} cannot be given its name back"):
            recover_interrupted_swap(path.with_suffix(""))
    for suffix in TEMPORARY_SUFFIXES:
        for path in root.path.glob(f"step-*{suffix}"):
            if not _has_wrong_signature(LocalStorage(path, root.options)):
                shutil.rmtree(path, ignore_errors=True)


def archive_after(root: Storage, *, after_step: int, files_to_copy: Sequence[Path] = ()) -> Storage | None:
    """Move the checkpoints of steps after `after_step` (-1: all) to `root`/abandoned-N, and copy files there.

    Returns the storage of the archive; None if there was nothing to move. Raises CheckpointWriteError.
    """
    if not hasattr(root, "write_file"):
        raise CheckpointWriteError(f"{root} cannot be written to. Name a directory or a URL.")
    with _convert_write_errors(f"checkpoints of later steps in {root} cannot be moved"):
        later = [checkpoint for step, checkpoint in list_step_checkpoints(root) if step > after_step]
        if not later:
            return None
        numbers = [int(match[1]) for name in root.list_children() if (match := ARCHIVE_PATTERN.fullmatch(name))]
        archive = root.child(f"abandoned-{max(numbers, default=0) + 1}")
        for file in files_to_copy:
            if file.is_file():
                archive.write_file(file.name, [file.read_bytes()])
        for checkpoint in later:
            checkpoint.move_to(archive.child(checkpoint.name))
        return archive


def remove_checkpoints(root: Storage) -> None:
    """Remove all checkpoints of a run; other files in `root` stay. Raises CheckpointWriteError."""
    with _convert_write_errors(f"the checkpoints in {root} cannot be removed"):
        for name in root.list_children():
            if STEP_PATTERN.fullmatch(name) or ARCHIVE_PATTERN.fullmatch(name):
                root.child(name).remove()

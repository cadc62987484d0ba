"""The checkpoints of a run: written complete or not at all, kept, moved aside, and removed.

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
"""Yields the bytes of a file, part by part; called for each attempt to write it."""

HUGGING_FACE_FOLDER = "huggingface"
"""Directory of the model's configuration and the tokenizer in a checkpoint."""
EVALUATIONS_KEY = "evaluations"
"""Key of `Manifest.extra` with the losses of a checkpoint, by evaluation set."""
ARCHIVE_PATTERN = re.compile(r"abandoned-(\d+)")
"""Name of a place for checkpoints of later steps than the one a run went back to."""


@contextmanager
def _convert_write_errors(failure: str) -> Iterator[None]:
    """Turn an OSError into a CheckpointWriteError that says what cannot be done."""
    try:
        yield
    except OSError as error:
        raise CheckpointWriteError(f"{failure}: {error}.") from error


def create_writer(storage: Storage) -> CheckpointWriter:
    """Return a checkpoint to be written at a place."""
    if isinstance(storage, LocalStorage):
        return LocalCheckpointWriter(storage)
    if not hasattr(storage, "write_file"):
        raise CheckpointWriteError(f"{storage} can be read, but not be written to. Name a directory or a URL.")
    return CheckpointWriter(storage)


class CheckpointWriter:
    """A checkpoint that is being written, to an object store.

    The first rank calls `begin`, and `commit` or `discard`; all ranks call `write`. The files are written to `target`.
    """

    def __init__(self, storage: Storage, target: Storage | None = None) -> None:
        self.storage, self.target = storage, target or storage

    def prepare(self) -> None:
        """Make room for the checkpoint. Raises CheckpointWriteError."""
        _reject_wrong_signature(self.storage)
        with _convert_write_errors(f"the checkpoint {self.storage} cannot be written"):
            self.storage.remove()

    def write_file(self, name: str, parts: ByteParts) -> StoredFile:
        """Write a file, which is stored when this returns. Raises OSError."""
        in_chunks = self.storage.options.key is not None and name.startswith(TENSORS_PREFIX)

        def write() -> StoredFile:
            counted = _HashedParts(parts, in_blocks=in_chunks)
            self.target.write_file(name, counted)
            return counted.to_stored_file()

        return retry(write, self.storage.options, f"writing {self.target}/{name}")

    def commit(self, manifest: Manifest) -> None:
        """Complete the checkpoint. After an OSError one of that name is unchanged, or `recover` restores it."""
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
        """Remove what could not be completed, as far as possible."""
        try:
            self.storage.remove()
        except OSError:
            # Without a manifest it is not a checkpoint; the next start removes it.
            return


class LocalCheckpointWriter(CheckpointWriter):
    """A checkpoint that is being written to a directory; see [Note: complete or absent]."""

    def __init__(self, storage: LocalStorage) -> None:
        self.final_path, self.temporary_path = storage.path, sibling_path(storage.path, "writing")
        super().__init__(storage, LocalStorage(self.temporary_path, storage.options))

    def prepare(self) -> None:
        access, writing = self.storage.options, self.temporary_path
        for path in (self.final_path, sibling_path(self.final_path, "replaced"), writing):
            _reject_wrong_signature(LocalStorage(path, access))
        with _convert_write_errors(f"the checkpoint {self.final_path} cannot be written"):
            recover_interrupted_swap(self.final_path)
            shutil.rmtree(writing, ignore_errors=True)
            if writing.is_symlink():
                raise CheckpointError(f"{writing} is a link, through which no checkpoint is written. Remove it.")
            retry(lambda: writing.mkdir(parents=True, exist_ok=True), access, f"making {writing}")

    def commit(self, manifest: Manifest) -> None:
        self._write_manifest(manifest)
        for directory in {(self.temporary_path / name).parent for name in (MANIFEST_FILE, *manifest.files)}:
            fsync_directory(directory)
        replace_directory(self.temporary_path, self.final_path)

    def discard(self) -> None:
        shutil.rmtree(self.temporary_path, ignore_errors=True)


class _HashedParts:
    """Parts of a file on their way to storage, and the checksums of what was written."""

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
    """Give a complete directory its name, replacing one of that name; see [Note: swap, then remove]."""
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
    """Finish an interrupted `replace_directory`, as the writer: the new checkpoint gets the name if it is complete."""
    old, new = sibling_path(final, "replaced"), sibling_path(final, "writing")
    if old.exists() and not final.exists():
        (old if read_valid_manifest(new) is None else new).rename(final)


def read_valid_manifest(checkpoint: StorageLike) -> Manifest | None:
    """Return the manifest; None if the checkpoint is incomplete, by the sizes of its files, or cannot be read."""
    try:
        return read_manifest(checkpoint)
    except CheckpointError:
        return None


def _has_wrong_signature(checkpoint: StorageLike) -> bool:
    """Return whether there is a checkpoint that is not signed with the key of its place."""
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
    """Remove older checkpoints of a run; see `Checkpointer`. Only valid ones are counted and removed.

    Those of later steps than `newest_step`, which was saved last, are neither: the run went back behind them. Raises
    CheckpointError.
    """
    if keep_last is None:
        return
    found = [(int(place.name.rpartition("-")[2]), place) for place in list_checkpoints(open_storage(root))]
    valid = [(step, place) for step, place in found if step <= newest_step and read_valid_manifest(place) is not None]
    best = {step for _, step, _ in find_best_checkpoints([place for _, place in valid], eval_set, keep_best or 0)}
    kept = 0
    for step, place in valid:
        if kept >= keep_last and (step in best or (keep_every is not None and step % keep_every == 0)):
            continue
        kept += 1
        if kept > keep_last:
            with _convert_write_errors(f"the older checkpoint {place} cannot be removed"):
                place.remove()


def find_best_checkpoints(
    checkpoints: Sequence[CheckpointT], eval_set: str, count: int
) -> list[tuple[float, int, CheckpointT]]:
    """Return loss, step and place of the `count` checkpoints with the lowest finite losses of a set, the best first."""
    found = []
    for place in checkpoints if count else ():
        manifest = read_valid_manifest(place)
        losses = None if manifest is None else manifest.extra.get(EVALUATIONS_KEY)
        loss = losses.get(eval_set) if isinstance(losses, dict) else None
        if manifest is not None and isinstance(loss, int | float) and math.isfinite(loss):
            found.append((float(loss), manifest.step, place))
    return sorted(found, key=lambda each: each[:2])[:count]


def cleanup(root: Storage) -> None:
    """Remove what interrupted runs left incomplete; only the writer of `root` may call this.

    Complete checkpoints that are not signed with the key of `root` stay. Raises CheckpointWriteError.
    """
    if isinstance(root, LocalStorage):
        _cleanup_directory(root)
        return
    with _convert_write_errors(f"what a run has left in {root} cannot be removed"):
        for _, place in list_step_checkpoints(root):
            if MANIFEST_FILE not in (place.list_file_sizes() or {}):
                place.remove()


def _cleanup_directory(root: LocalStorage) -> None:
    for path in root.path.glob("step-*.replaced"):
        with _convert_write_errors(f"{path} cannot be given its name back"):
            recover_interrupted_swap(path.with_suffix(""))
    for kind in TEMPORARY_SUFFIXES:
        for path in root.path.glob(f"step-*{kind}"):
            if not _has_wrong_signature(LocalStorage(path, root.options)):
                shutil.rmtree(path, ignore_errors=True)


def archive_after(root: Storage, *, after_step: int, files_to_copy: Sequence[Path] = ()) -> Storage | None:
    """Move the checkpoints of steps later than `process_result`, -1 for all, to `root`/abandoned-N, with copies of
    files.

    Returns the new place; None if there was nothing to move. Raises CheckpointWriteError.
    """
    if not hasattr(root, "write_file"):
        raise CheckpointWriteError(f"{root} cannot be written to. Name a directory or a URL.")
    with _convert_write_errors(f"checkpoints of later steps in {root} cannot be moved"):
        later = [place for step, place in list_step_checkpoints(root) if step > after_step]
        if not later:
            return None
        numbers = [int(match[1]) for name in root.list_children() if (match := ARCHIVE_PATTERN.fullmatch(name))]
        aside = root.child(f"abandoned-{max(numbers, default=0) + 1}")
        for file in files_to_copy:
            if file.is_file():
                aside.write_file(file.name, [file.read_bytes()])
        for place in later:
            place.move_to(aside.child(place.name))
        return aside


def remove_checkpoints(root: Storage) -> None:
    """Remove all checkpoints of a run from a place that may hold other things. Raises CheckpointWriteError."""
    with _convert_write_errors(f"the checkpoints in {root} cannot be removed"):
        for name in root.list_children():
            if STEP_PATTERN.fullmatch(name) or ARCHIVE_PATTERN.fullmatch(name):
                root.child(name).remove()

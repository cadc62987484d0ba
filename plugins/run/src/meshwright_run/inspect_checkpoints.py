"""Inspect checkpoints: their contents, integrity and signatures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Group
from rich.table import Table
from rich.text import Text

from meshwright.plugin import (
    INDEX_FILE,
    MANIFEST_FILE,
    MODEL_PREFIX,
    OPTIMIZER_PREFIX,
    CheckpointError,
    CheckpointSignatureError,
    IncompleteCheckpointError,
    Index,
    Manifest,
    Storage,
    StorageReader,
    StoredTensor,
    compute_stored_file,
    convert_read_errors,
    find_size_error,
    format_dtype,
    list_checkpoints,
    open_storage,
    read_and_verify,
    read_index,
    read_manifest_and_sizes,
)


def find_checkpoints(storage: Storage) -> list[Storage]:
    """List the checkpoints in a directory, newest first, or the directory, if it is one. Raises CheckpointError."""
    found = list_checkpoints(storage)
    with convert_read_errors(storage):
        if not found and not {MANIFEST_FILE, INDEX_FILE} & (storage.list_file_sizes() or {}).keys():
            # Raises the error for a directory without a checkpoint.
            read_manifest_and_sizes(storage)
    return found or [storage]


@dataclass(frozen=True)
class VerifiedCheckpoint:
    """Result of reading a checkpoint; the manifest is None if it could not be read."""

    storage: StorageReader
    manifest: Manifest | None
    nbytes: int
    problems: tuple[str, ...]


def verify_checkpoints(storage: Storage) -> Iterator[VerifiedCheckpoint]:
    """Read every byte of the checkpoints in a directory. Raises CheckpointError if there is none."""
    for checkpoint in find_checkpoints(storage):
        yield _verify_checkpoint(checkpoint)


def _verify_checkpoint(storage: StorageReader) -> VerifiedCheckpoint:
    try:
        manifest, sizes = read_manifest_and_sizes(storage)
    except IncompleteCheckpointError as error:
        return VerifiedCheckpoint(storage, None, 0, (str(error),))
    problems, nbytes = [], 0
    for name, expected in manifest.files.items():
        problem = find_size_error(manifest, sizes, name)
        if problem is None:
            stored = compute_stored_file(storage, name)
            if stored != expected:
                problem = f"the contents of {name} have changed since it was written"
            nbytes += stored.size
        if problem is not None:
            problems.append(problem)
    if not problems:
        # The manifest may not list the index file.
        try:
            read_index(storage, manifest)
        except CheckpointError as error:
            problems.append(str(error))
    return VerifiedCheckpoint(storage, manifest, nbytes, tuple(problems))


def describe_signature(manifest: Manifest, storage: StorageReader) -> str:
    """Describe whether a checkpoint is signed, and whether its signature was verified."""
    if not manifest.is_signed:
        return "not signed"
    return "signed, not checked" if storage.options.key is None else "signed with this key"


def build_checkpoint_table(location: str | Path | Storage) -> tuple[Group, bool]:
    """Return a table of one checkpoint or all in a directory, and whether all are valid. Raises CheckpointError."""
    table = Table("checkpoint", "step", "strategy", "mesh", "parameters", "dtypes", "model", "optimizer", "state")
    problems = []
    for checkpoint in find_checkpoints(open_storage(location)):
        try:
            manifest = read_and_verify(checkpoint)
            columns, state = _format_cells(manifest, read_index(checkpoint, manifest)), "valid"
        except CheckpointSignatureError:
            raise
        except CheckpointError as error:
            columns, state = ("",) * 7, "incomplete"
            problems.append(Text(str(error)))
        table.add_row(checkpoint.name, *columns, state)
    return Group(table, *problems), not problems


def _format_cells(manifest: Manifest, index: Index) -> tuple[str, ...]:
    model = {name: each for name, each in index.tensors.items() if name.startswith(MODEL_PREFIX)}
    optimizer = [each for name, each in index.tensors.items() if name.startswith(OPTIMIZER_PREFIX)]
    degrees = ", ".join(f"{axis}={degree}" for axis, degree in manifest.mesh.items() if degree > 1)
    return (
        str(manifest.step),
        manifest.strategy,
        degrees or "one rank",
        f"{sum(each.shape.numel() for each in model.values()):,}",
        ", ".join(sorted({format_dtype(each.dtype) for each in model.values()})),
        _format_size(model.values()) + (f", adapters on {manifest.base['path']}" if manifest.base is not None else ""),
        _format_size(optimizer) if manifest.has_optimizer else "none",
    )


def _format_size(tensors: Iterable[StoredTensor]) -> str:
    return f"{sum(each.nbytes for each in tensors) / 1e6:,.1f} MB"

"""Inspect checkpoints: their contents, integrity and signatures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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

    def to_dict(self) -> dict[str, Any]:
        signature = None if self.manifest is None else describe_signature(self.manifest, self.storage)
        return {
            "checkpoint": str(self.storage),
            "state": "incomplete" if self.problems else "valid",
            "bytes_read": self.nbytes,
            "signature": signature,
            "problems": list(self.problems),
        }


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


def describe_checkpoints(location: str | Path | Storage) -> list[dict[str, Any]]:
    """Describe a checkpoint, or each in a directory, as plain values; sizes in bytes. Raises CheckpointError if there
    is none."""
    found: list[dict[str, Any]] = []
    for checkpoint in find_checkpoints(open_storage(location)):
        try:
            manifest = read_and_verify(checkpoint)
            values = _describe_contents(manifest, read_index(checkpoint, manifest))
        except CheckpointSignatureError:
            raise
        except CheckpointError as error:
            values = {"state": "incomplete", "problem": str(error)}
        found.append({"checkpoint": checkpoint.name, **values})
    return found


def _describe_contents(manifest: Manifest, index: Index) -> dict[str, Any]:
    model = [each for name, each in index.tensors.items() if name.startswith(MODEL_PREFIX)]
    optimizer = [each for name, each in index.tensors.items() if name.startswith(OPTIMIZER_PREFIX)]
    return {
        "state": "valid",
        "step": manifest.step,
        "strategy": manifest.strategy,
        "mesh": dict(manifest.mesh),
        "parameters": sum(each.shape.numel() for each in model),
        "dtypes": sorted({format_dtype(each.dtype) for each in model}),
        "model_bytes": sum(each.nbytes for each in model),
        "optimizer_bytes": sum(each.nbytes for each in optimizer) if manifest.has_optimizer else None,
        "base": None if manifest.base is None else manifest.base["path"],
    }


def render_checkpoints(checkpoints: Sequence[Mapping[str, Any]]) -> Group:
    """Return the table of `describe_checkpoints`, followed by what is wrong."""
    table = Table("checkpoint", "step", "strategy", "mesh", "parameters", "dtypes", "model", "optimizer", "state")
    for each in checkpoints:
        table.add_row(each["checkpoint"], *(_format_cells(each) if "step" in each else ("",) * 7), each["state"])
    return Group(table, *(Text(each["problem"]) for each in checkpoints if "problem" in each))


def _format_cells(values: Mapping[str, Any]) -> tuple[str, ...]:
    base, optimizer = values["base"], values["optimizer_bytes"]
    return (
        str(values["step"]),
        values["strategy"],
        ", ".join(f"{axis}={degree}" for axis, degree in values["mesh"].items() if degree > 1) or "one rank",
        f"{values['parameters']:,}",
        ", ".join(values["dtypes"]),
        _format_size(values["model_bytes"]) + (f", adapters on {base}" if base is not None else ""),
        "none" if optimizer is None else _format_size(optimizer),
    )


def _format_size(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.1f} MB"

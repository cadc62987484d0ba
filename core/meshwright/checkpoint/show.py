"""What is in a checkpoint, for people."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rich.console import Group
from rich.table import Table
from rich.text import Text
from torch.distributed.checkpoint import FileSystemReader, TensorStorageMetadata

from ..errors import CheckpointError
from .directory import Manifest, read_manifest, steps_in, verify
from .values import MODEL, OPTIMIZER


def shown(directory: Path) -> tuple[Group, bool]:
    """A table of a checkpoint, or of all checkpoints in a directory of them; and whether all are whole.

    Raises:
        CheckpointError: there is none.
    """
    found = [path for _, path in steps_in(directory)]
    if not found:
        manifest, problem = _read(directory)
        if manifest is None and not (directory / ".metadata").exists():
            raise CheckpointError(problem)
        found = [directory]
    table = Table("checkpoint", "step", "strategy", "mesh", "parameters", "dtypes", "model", "optimizer", "state")
    problems = []
    for path in found:
        manifest, problem = _read(path)
        table.add_row(path.name, *(_columns(path, manifest) if manifest is not None else ("",) * 7), _state(problem))
        if problem:
            problems.append(Text(problem))
    return Group(table, *problems), not problems


def _read(path: Path) -> tuple[Manifest | None, str]:
    try:
        manifest = read_manifest(path)
        verify(path, manifest, list(manifest.files))
    except CheckpointError as error:
        return None, str(error)
    return manifest, ""


def _state(problem: str) -> str:
    return "torn" if problem else "whole"


def _columns(path: Path, manifest: Manifest) -> tuple[str, ...]:
    stored = FileSystemReader(path).read_metadata().state_dict_metadata
    tensors = {name: each for name, each in stored.items() if isinstance(each, TensorStorageMetadata)}
    model = {name: each for name, each in tensors.items() if name.startswith(MODEL)}
    optimizer = [each for name, each in tensors.items() if name.startswith(OPTIMIZER)]
    degrees = ", ".join(f"{axis}={degree}" for axis, degree in manifest.mesh.items() if degree > 1)
    dtypes = sorted({str(each.properties.dtype).removeprefix("torch.") for each in model.values()})
    return (
        str(manifest.step),
        manifest.strategy,
        degrees or "one rank",
        f"{sum(each.size.numel() for each in model.values()):,}",
        ", ".join(dtypes),
        _megabytes(model.values()),
        _megabytes(optimizer) if manifest.groups is not None else "none",
    )


def _megabytes(tensors: Iterable[TensorStorageMetadata]) -> str:
    return f"{sum(each.size.numel() * each.properties.dtype.itemsize for each in tensors) / 1e6:,.1f} MB"

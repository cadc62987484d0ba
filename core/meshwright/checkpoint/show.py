"""What is in a checkpoint, for people."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..base.errors import CheckpointError
from .format1 import METADATA
from .index import INDEX, Index, StoredTensor, dtype_name
from .manifest import MANIFEST, Manifest, read_manifest, steps_in, verify
from .read_index import read_index
from .values import MODEL, OPTIMIZER


def shown(directory: Path) -> tuple[Group, bool]:
    """A table of a checkpoint, or of all checkpoints in a directory of them; and whether all are whole.

    Raises:
        CheckpointError: there is none.
    """
    found = [path for _, path in steps_in(directory)]
    if not found:
        if not any((directory / name).exists() for name in (MANIFEST, INDEX, METADATA)):
            read_manifest(directory)
        found = [directory]
    table = Table("checkpoint", "step", "strategy", "mesh", "parameters", "dtypes", "model", "optimizer", "state")
    problems = []
    for path in found:
        columns, problem = _read(path)
        table.add_row(path.name, *(columns or ("",) * 7), _state(problem))
        if problem:
            problems.append(Text(problem))
    return Group(table, *problems), not problems


def _read(path: Path) -> tuple[tuple[str, ...] | None, str]:
    try:
        manifest = read_manifest(path)
        verify(path, manifest, list(manifest.files))
        return _columns(manifest, read_index(path, manifest)), ""
    except CheckpointError as error:
        return None, str(error)


def _state(problem: str) -> str:
    return "torn" if problem else "whole"


def _columns(manifest: Manifest, index: Index) -> tuple[str, ...]:
    model = {name: each for name, each in index.tensors.items() if name.startswith(MODEL)}
    optimizer = [each for name, each in index.tensors.items() if name.startswith(OPTIMIZER)]
    degrees = ", ".join(f"{axis}={degree}" for axis, degree in manifest.mesh.items() if degree > 1)
    dtypes = sorted({dtype_name(each.dtype) for each in model.values()})
    return (
        str(manifest.step),
        manifest.strategy,
        degrees or "one rank",
        f"{sum(each.shape.numel() for each in model.values()):,}",
        ", ".join(dtypes),
        _megabytes(model.values()) + (f", adapters over {manifest.base['path']}" if manifest.base is not None else ""),
        _megabytes(optimizer) if manifest.has_optimizer else "none",
    )


def _megabytes(tensors: Iterable[StoredTensor]) -> str:
    return f"{sum(each.nbytes for each in tensors) / 1e6:,.1f} MB"

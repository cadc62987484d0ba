"""What is in a checkpoint, for people."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..base.errors import CheckpointError
from .index import Index, StoredTensor, dtype_name
from .keys import ForeignCheckpointError
from .manifest import Manifest, read_manifest, verify
from .opening import place_of
from .places import Folder, Place
from .read_index import read_index
from .values import MODEL, OPTIMIZER
from .verifying import found_in


def shown(where: str | Path | Folder) -> tuple[Group, bool]:
    """A table of a checkpoint, or of all checkpoints in a directory of them; and whether all are whole.

    Raises:
        CheckpointError: there is none.
    """
    table = Table("checkpoint", "step", "strategy", "mesh", "parameters", "dtypes", "model", "optimizer", "state")
    problems = []
    for place in found_in(place_of(where)):
        columns, problem = _read(place)
        table.add_row(place.name, *(columns or ("",) * 7), _state(problem))
        if problem:
            problems.append(Text(problem))
    return Group(table, *problems), not problems


def _read(place: Place) -> tuple[tuple[str, ...] | None, str]:
    try:
        manifest = read_manifest(place)
        verify(place, manifest, list(manifest.files))
        return _columns(manifest, read_index(place, manifest)), ""
    except ForeignCheckpointError:
        raise
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

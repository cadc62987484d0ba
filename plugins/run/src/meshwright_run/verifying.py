"""Look at checkpoints: what they hold, whether every byte is as it was written, and who signed them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Group
from rich.table import Table
from rich.text import Text

from meshwright.plugin import (
    INDEX,
    MANIFEST,
    MODEL,
    OPTIMIZER,
    CheckpointError,
    Folder,
    ForeignCheckpointError,
    Index,
    Manifest,
    Place,
    StoredTensor,
    TornCheckpointError,
    all_in,
    dtype_name,
    manifest_and_sizes,
    place_of,
    read_and_verified,
    read_index,
    reading,
    stored_in,
    wrong_size,
)


def found_in(folder: Folder) -> list[Folder]:
    """List the checkpoints in a directory, the newest first, or the directory if it is one. Raises CheckpointError."""
    found = all_in(folder)
    with reading(folder):
        if not found and not {MANIFEST, INDEX} & (folder.sizes() or {}).keys():
            # Raises the error that says so.
            manifest_and_sizes(folder)
    return found or [folder]


@dataclass(frozen=True)
class Verified:
    """Result of reading a checkpoint; the manifest is None if it could not be read."""

    place: Place
    manifest: Manifest | None
    nbytes: int
    problems: tuple[str, ...]


def verified(folder: Folder) -> Iterator[Verified]:
    """Read every byte of the checkpoints in a directory. Raises CheckpointError if there is none."""
    for place in found_in(folder):
        yield _verified(place)


def _verified(place: Place) -> Verified:
    try:
        manifest, sizes = manifest_and_sizes(place)
    except TornCheckpointError as error:
        return Verified(place, None, 0, (str(error),))
    problems, nbytes = [], 0
    for name, expected in manifest.files.items():
        problem = wrong_size(manifest, sizes, name)
        if problem is None:
            stored = stored_in(place, name)
            if stored != expected:
                problem = f"the contents of {name} have changed since it was written"
            nbytes += stored.size
        if problem is not None:
            problems.append(problem)
    if not problems:
        # The manifest may name no index.
        try:
            read_index(place, manifest)
        except CheckpointError as error:
            problems.append(str(error))
    return Verified(place, manifest, nbytes, tuple(problems))


def signed(manifest: Manifest, place: Place) -> str:
    """Say who has signed a checkpoint."""
    if not manifest.is_signed:
        return "not signed"
    return "signed, not checked" if place.access.key is None else "signed with this key"


def shown(where: str | Path | Folder) -> tuple[Group, bool]:
    """Return a table of one checkpoint or all in a directory, and whether they are valid. Raises CheckpointError."""
    table = Table("checkpoint", "step", "strategy", "mesh", "parameters", "dtypes", "model", "optimizer", "state")
    problems = []
    for place in found_in(place_of(where)):
        try:
            manifest = read_and_verified(place)
            columns, state = _columns(manifest, read_index(place, manifest)), "whole"
        except ForeignCheckpointError:
            raise
        except CheckpointError as error:
            columns, state = ("",) * 7, "torn"
            problems.append(Text(str(error)))
        table.add_row(place.name, *columns, state)
    return Group(table, *problems), not problems


def _columns(manifest: Manifest, index: Index) -> tuple[str, ...]:
    model = {name: each for name, each in index.tensors.items() if name.startswith(MODEL)}
    optimizer = [each for name, each in index.tensors.items() if name.startswith(OPTIMIZER)]
    degrees = ", ".join(f"{axis}={degree}" for axis, degree in manifest.mesh.items() if degree > 1)
    return (
        str(manifest.step),
        manifest.strategy,
        degrees or "one rank",
        f"{sum(each.shape.numel() for each in model.values()):,}",
        ", ".join(sorted({dtype_name(each.dtype) for each in model.values()})),
        _megabytes(model.values()) + (f", adapters over {manifest.base['path']}" if manifest.base is not None else ""),
        _megabytes(optimizer) if manifest.has_optimizer else "none",
    )


def _megabytes(tensors: Iterable[StoredTensor]) -> str:
    return f"{sum(each.nbytes for each in tensors) / 1e6:,.1f} MB"

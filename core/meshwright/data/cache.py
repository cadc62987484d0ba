"""Make a directory once, however many processes want it.

An entry is built beside its place and renamed into it, so a reader finds it whole or not at all. Builders take
turns by a file lock, which the system drops when its holder dies; what a killed builder left is removed by the next.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from filelock import FileLock

from ..base.errors import DataError

EntryT = TypeVar("EntryT")


def cache_root(cache_dir: str | None) -> Path:
    """The directory that `DataConfig.cache_dir` names."""
    if cache_dir is not None:
        return Path(cache_dir).expanduser().absolute()
    # The XDG specification has relative paths ignored.
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if os.path.isabs(home) else Path.home() / ".cache") / "meshwright"


def cached_entry(directory: Path, *, load: Callable[[Path], EntryT | None], build: Callable[[Path], None]) -> EntryT:
    """Load the entry in `directory`, building it first where it is missing or broken.

    Args:
        directory: the entry's place; its name must change with everything that changes the content.
        load: reads an entry; None where it is missing, incomplete or corrupt.
        build: fills the empty directory that it is given.

    Raises:
        DataError: the cache cannot be written, or a new entry does not load.
    """
    entry = load(directory)
    if entry is not None:
        return entry
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(directory.with_name(directory.name + ".lock")):
            entry = load(directory)  # another process may have built it meanwhile
            if entry is None:
                _build(directory, build)
                entry = load(directory)
    except OSError as error:
        raise DataError(
            f"cannot keep the tokenized corpus in {directory.parent}: {error}. Set cache_dir to a directory that can "
            "be written and has room."
        ) from error
    if entry is None:
        raise DataError(f"the tokenized corpus in {directory} cannot be read back just after it was written.")
    return entry


def _build(directory: Path, build: Callable[[Path], None]) -> None:
    scratch = directory.with_name(directory.name + ".building")
    for stale in (scratch, directory):
        if stale.exists():
            shutil.rmtree(stale)
    scratch.mkdir()
    try:
        build(scratch)
        os.replace(scratch, directory)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)

"""Make a directory once, however many processes want it.

It is built beside its place under a file lock, and renamed into it when it is complete.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from filelock import FileLock

from meshwright.plugin import DataError

EntryT = TypeVar("EntryT")


def cache_root(cache_dir: str | None) -> Path:
    if cache_dir is not None:
        return Path(cache_dir).expanduser().absolute()
    # The XDG specification has relative paths ignored.
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if os.path.isabs(home) else Path.home() / ".cache") / "meshwright"


def cached_entry(directory: Path, *, load: Callable[[Path], EntryT | None], build: Callable[[Path], None]) -> EntryT:
    """Load the entry in `directory`, building it first where it is missing or broken (`load` returns None).

    The name of `directory` must change with everything that changes the content; `build` fills an empty directory.
    """
    entry = load(directory)
    if entry is not None:
        return entry
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(directory.with_name(directory.name + ".lock")):
            entry = load(directory)  # another process may have built it meanwhile
            if entry is None:
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
                entry = load(directory)
    except OSError as error:
        raise DataError(
            f"cannot keep the tokenized corpus in {directory.parent}: {error}. Set cache_dir to a directory that can "
            "be written and has room."
        ) from error
    if entry is None:
        raise DataError(f"the tokenized corpus in {directory} cannot be read back just after it was written.")
    return entry

"""Private names of `datasets`. No torch in this module.

[Note: own files] A dataset's README may name files (`configs`, `data_files`) anywhere, which the library would open.
Here only files of the dataset itself are opened.
"""

from __future__ import annotations

import glob
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from meshwright.plugin import DataError


def is_packaged_reader(datasets: Any, name: str) -> bool:
    """Return whether a name is a reader of the library, such as "csv", which reads files of the current directory."""
    return name in datasets.packaged_modules._PACKAGED_DATASETS_MODULES


@contextmanager
def restrict_data_files(data_files: Any, dataset: str, directory: Path | None) -> Iterator[None]:
    """Let the library (module `data_files`) open only a dataset's own files; see [Note: own files]."""
    resolve = data_files.resolve_pattern

    def resolve_own(pattern: str, base_path: str, *arguments: Any, **options: Any) -> list[str]:
        if not _is_own_file(pattern, str(base_path), directory):
            raise DataError(
                f"the README of the dataset {dataset} names {pattern!r} in {str(base_path)!r}, which is not of the "
                "dataset. Only its own files are read: download the others, and name them under files."
            )
        # A directory's own brackets are no pattern, though the library takes them for one.
        base = base_path if directory is None else glob.escape(str(base_path))
        found: list[str] = resolve(pattern, base, *arguments, **options)
        return found

    data_files.resolve_pattern = resolve_own
    try:
        yield
    finally:
        data_files.resolve_pattern = resolve


def _is_own_file(pattern: str, base: str, directory: Path | None) -> bool:
    if "::" in base + pattern or ".." in (*PurePosixPath(base).parts, *PurePosixPath(pattern).parts):
        return False
    if directory is None:
        return base.startswith("hf://datasets/") and ("://" not in pattern or pattern.startswith("hf://datasets/"))
    return "://" not in base + pattern and Path(base, pattern).is_relative_to(directory.resolve())

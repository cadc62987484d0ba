"""Private names of the library `datasets`. This module does not import torch.

[Note: own files] A dataset's README may name files in any location (`configs`, `data_files`), and the library would
open them. Here it can open only files of the dataset itself.
"""

from __future__ import annotations

import glob
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from meshwright.plugin import DataError


def is_packaged_reader(datasets: Any, name: str) -> bool:
    """Return whether a name is a built-in reader, such as "csv", which reads files of the current directory."""
    return name in datasets.packaged_modules._PACKAGED_DATASETS_MODULES


@contextmanager
def restrict_data_files(data_files: Any, dataset: str, directory: Path | None) -> Iterator[None]:
    """Restrict the library (its module `data_files`) to a dataset's own files; see [Note: own files]."""
    resolve = data_files.resolve_pattern

    def resolve_own(pattern: str, base_path: str, *arguments: Any, **options: Any) -> list[str]:
        if not _is_own_file(pattern, str(base_path), directory):
            raise DataError(
                f"the README of the dataset {dataset} names {pattern!r} in {str(base_path)!r}, which is outside the "
                "dataset. Only its own files are read: download the others, and list them under files."
            )
        # The library would read brackets in the directory's path as a glob pattern.
        base = base_path if directory is None else glob.escape(str(base_path))
        files: list[str] = resolve(pattern, base, *arguments, **options)
        return files

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

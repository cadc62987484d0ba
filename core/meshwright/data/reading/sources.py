"""Find what a source names, and read it, always in the same order.

Files come in the order of the globs and, within one glob, sorted by path.
"""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...base.errors import DataError
from ..config import STDLIB, SourceConfig
from ..progress import Meter
from . import hub
from .opening import kind_of
from .readers import SUFFIXES, Found, read_file
from .stdlib import library_records

_STDLIB_LEAVES_OUT = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"}
)
_PLAIN = (".txt", ".py")
"""Kinds of files that are text as a whole."""


@dataclass(frozen=True)
class SourceFile:
    """A file as it was found; size and time stand in for its content in cache keys."""

    path: Path
    """Absolute."""
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class FoundSource:
    """A source whose files have been looked at; see `find_source`."""

    config: SourceConfig
    files: tuple[SourceFile, ...]
    dataset: Any = None
    """Of Hugging Face, where the source is one that had to be opened to find its files."""

    def values(self, meter: Meter) -> Iterator[Found]:
        """Yield what the source holds, as it holds it; may be called again, and reads the files anew.

        Raises:
            DataError: a file cannot be read, or does not hold what its kind says.
        """
        if self.config.dataset is not None:
            yield from hub.rows(self.config, meter, self.dataset)
            return
        meter.total = sum(file.size for file in self.files)
        for file in self.files:
            for value, where in read_file(file.path, meter):
                if file.path.suffix == ".py" and self.config.format != "text":
                    yield from library_records(value["text"], file.path, self.config.format)
                elif kind_of(file.path) in _PLAIN:
                    # Such files have no fields, so the one of the source's other files holds the text.
                    yield {self.config.fields.get("text", "text"): value["text"]}, where
                else:
                    yield value, where
            meter.done, meter.file = meter.done + file.size, None

    def identity(self) -> list[tuple[str, int, int]]:
        """What changes whenever the content does; of JSON."""
        return [(str(file.path), file.size, file.mtime_ns) for file in self.files]

    def check_unchanged(self) -> None:
        """Raise DataError if a file is no longer as it was found."""
        for file in self.files:
            if _found(file.path) != file:
                raise DataError(f"{file.path} changed while it was read. Start again when it is complete.")


def find_source(config: SourceConfig) -> FoundSource:
    """Find the files of a source.

    Raises:
        DataError: a glob matches no file, or a file of a kind that is not read; a dataset cannot be opened; or fields
            are named, and no file has any.
    """
    if config.dataset is not None:
        directory = hub.directory_of(config)
        if directory is not None:
            return FoundSource(config, tuple(_found(path) for path in sorted(directory.rglob("*")) if path.is_file()))
        if config.streaming:
            # Nothing is to be downloaded before it is read.
            return FoundSource(config, ())
        dataset = hub.open_dataset(config)
        return FoundSource(config, tuple(_found(path) for path in hub.files_of(dataset)), dataset)
    patterns = [config.files] if isinstance(config.files, str) else config.files or []
    # A file that several globs match is one file: dict keys keep the first place.
    paths = list(dict.fromkeys(path for pattern in patterns for path in _paths(pattern)))
    if all(kind_of(path) in _PLAIN for path in paths):
        if config.format != "text" and any(kind_of(path) == ".txt" for path in paths):
            raise DataError(
                f"format={config.format} is read from objects with fields; .txt files have none: {paths[0]}."
            )
        named = [*config.fields.values(), *config.columns]
        if named:
            raise DataError(
                f".txt files have no fields such as {named[0]!r} (text_field, fields or columns), and "
                f"{config.place!r} matches no others. Leave it out."
            )
    return FoundSource(config, tuple(_found(path) for path in paths))


def _paths(pattern: str) -> list[Path]:
    return _stdlib_paths() if pattern == STDLIB else _glob_paths(pattern)


def _stdlib_paths() -> list[Path]:
    root = sysconfig.get_paths()["stdlib"]
    paths = []
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = [name for name in subdirectories if name not in _STDLIB_LEAVES_OUT]
        paths += [Path(directory, name) for name in names if name.endswith(".py")]
    if not paths:
        raise DataError(
            f"corpus 'stdlib' is empty: no .py file under {root}. This Python comes without sources; "
            "name a glob of .txt or .jsonl files instead."
        )
    return sorted(paths)


def _glob_paths(pattern: str) -> list[Path]:
    matches = [Path(os.path.abspath(match)) for match in glob.glob(_literal_first(pattern), recursive=True)]
    paths = sorted(path for path in matches if not path.is_dir())
    if not paths:
        hint = (
            f" {matches[0]} is a directory: add '/**/*.txt' or '/**/*.jsonl' to it, or name it as a dataset if Hugging "
            "Face datasets has saved it."
            if matches
            else f" Relative globs start at {os.getcwd()}; ** matches directories of any depth."
        )
        raise DataError(f"corpus glob {pattern!r} matches no file.{hint}")
    for path in paths:
        if kind_of(path) not in SUFFIXES:
            raise DataError(
                f"corpus glob {pattern!r} matches {path}, whose suffix is {path.suffix!r}. Allowed: "
                f"{', '.join(SUFFIXES)}, each also with .gz or .zst. Narrow the glob, for instance to '*.txt', or "
                "convert the file."
            )
    return paths


def _literal_first(pattern: str) -> str:
    """A glob in which as many leading parts as exist by these very names stand for themselves, such as `run[1]`."""
    path = Path(os.path.expanduser(pattern))
    place, parts = path.anchor or ".", list(path.parts[1:] if path.anchor else path.parts)
    while parts and os.path.lexists(os.path.join(place, parts[0])):
        place = os.path.join(place, parts.pop(0))
    return os.path.join(glob.escape(place), *parts)


def _found(path: Path) -> SourceFile:
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error
    return SourceFile(path, status.st_size, status.st_mtime_ns)

"""Find the files or the dataset of a source, in the order of globs and then of paths, and read its records."""

from __future__ import annotations

import glob
import math
import os
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from meshwright.plugin import DataError, suggest_match

from ._compat import is_packaged_reader, restrict_data_files
from .config import FIELDS, STDLIB, SourceConfig
from .files import SUFFIXES, CsvRow, LocatedValue, get_file_kind, import_extra, read_file
from .progress import ReadProgress
from .stdlib_conversations import iter_stdlib_records

_STDLIB_EXCLUDED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"})
_TEXT_SUFFIXES = (".txt", ".py")
"""Suffixes of files that are one text document each."""
_ROWS_PER_BATCH = 256


@dataclass(frozen=True, slots=True)
class Record:
    """An example: its fields, under the source's names, and its location, such as "chats.jsonl:17".

    `error`: why it cannot be read, in which case it has no fields.
    """

    fields: dict[str, Any]
    location: str
    error: DataError | None = None


@dataclass(frozen=True)
class SourceFile:
    """A file as it was found, with its absolute path. Cache keys use size and time instead of the content."""

    path: Path
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class ResolvedSource:
    """A source whose files were found. `dataset`: the Hugging Face dataset, if it had to be opened to find them."""

    config: SourceConfig
    files: tuple[SourceFile, ...]
    dataset: Any = None

    def iter_values(self, progress: ReadProgress) -> Iterator[LocatedValue]:
        if self.config.dataset is not None:
            yield from self._iter_rows(progress)
            return
        progress.total = sum(file.size for file in self.files)
        for file in self.files:
            for value, where in read_file(file.path, progress):
                if isinstance(value, DataError):
                    yield value, where
                elif file.path.suffix == ".py" and self.config.format != "text":
                    yield from iter_stdlib_records(value["text"], file.path, self.config.format)
                elif get_file_kind(file.path) in _TEXT_SUFFIXES:
                    # Such files have no fields, so the text gets the field name that the source's other files use.
                    yield {get_source_field("text", self.config): value["text"]}, where
                else:
                    yield value, where
            progress.num_done, progress.file = progress.num_done + file.size, None

    def _iter_rows(self, progress: ReadProgress) -> Iterator[LocatedValue]:
        dataset = open_dataset(self.config) if self.dataset is None else self.dataset
        progress.total = len(dataset)
        with convert_dataset_errors(self.config):
            for batch in dataset.iter(_ROWS_PER_BATCH):
                for values in zip(*batch.values(), strict=True):
                    yield dict(zip(batch, values, strict=True)), format_row_location(self.config, progress.num_done)
                    progress.num_done += 1

    def get_cache_key(self) -> list[tuple[str, int, int]]:
        """Return JSON values that change whenever the content changes."""
        return [(str(file.path), file.size, file.mtime_ns) for file in self.files]

    def check_unchanged(self) -> None:
        for file in self.files:
            if _stat_file(file.path) != file:
                raise DataError(f"{file.path} changed while it was read. Start again when it is complete.")


# -- records


def read_records(
    source: SourceConfig | ResolvedSource,
    start: int = 0,
    *,
    progress: ReadProgress | None = None,
    keep_errors: bool = False,
) -> Iterator[Record]:
    """Read the examples of a source in order, without empty texts, and without the first `start`.

    Raises DataError for an example that cannot be read; with `keep_errors`, yields a record with the error instead.
    """
    resolved = source if isinstance(source, ResolvedSource) else resolve_source(source)
    config = resolved.config

    def build(value: Any, where: str) -> Record:
        try:
            return build_record(value, where, config)
        except DataError as error:
            if not keep_errors:
                raise
            return Record({}, where, error)

    records = (build(value, where) for value, where in resolved.iter_values(progress or ReadProgress()))
    if config.format == "text":
        records = (record for record in records if record.fields.get(get_source_field("text", config)) != "")
    return islice(records, start, None)


def build_record(value: Any, where: str, config: SourceConfig) -> Record:
    """Return a value as a record. Raises DataError if it is not an object, or a column is not a number."""
    if isinstance(value, DataError):
        raise value
    if not isinstance(value, dict):
        advice = " If the file holds one array of examples, name it .json." if isinstance(value, list) else ""
        raise DataError(
            f"{where}: holds a JSON {type(value).__name__}. Each example must be one object, such as "
            f'{{"{get_source_field(FIELDS[config.base_format][0], config)}": ...}}.{advice}'
        )
    if config.columns:
        value = {
            **value,
            **{get_source_field(name, config): _read_column(value, name, where, config) for name in config.columns},
        }
    return Record(value, where)


def get_source_field(name: str, config: SourceConfig) -> str:
    return config.field_names.get(name, name)


def _read_column(value: dict[str, Any], name: str, where: str, config: SourceConfig) -> Any:
    field = get_source_field(name, config)
    if field not in value:
        present = ", ".join(sorted(map(str, value))) or "none"
        raise DataError(
            f"{where}: no field {field!r}, which is listed under columns. Fields of this record: {present}."
            f"{suggest_match(field, map(str, value))} Name the field that holds it, with fields: {{{name}: ...}}."
        )
    column: Any = _parse_number(value[field]) if isinstance(value, CsvRow) else value[field]
    # One number per token if tokens are given, or one per answer of a pair.
    is_list = isinstance(column, list) and config.format in ("tokens", "preference")
    for each in column if is_list else [column]:
        is_float, is_int = isinstance(each, float), isinstance(each, int)
        if not (is_float and math.isfinite(each)) and not (is_int and -(2**63) <= each < 2**63):
            raise DataError(
                f"{where}: column {field!r} holds {each!r:.80}, a {type(each).__name__}, but must hold a finite number."
            )
    return column


def _parse_number(cell: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(cell)
        except ValueError:
            pass
    return cell


# -- files


def resolve_source(config: SourceConfig) -> ResolvedSource:
    """Find the files of a source. Raises DataError if some are missing, or cannot be read in the source's format."""
    if config.dataset is not None:
        directory = _find_dataset_directory(config)
        if directory is not None:
            return ResolvedSource(
                config, tuple(_stat_file(path) for path in sorted(directory.rglob("*")) if path.is_file())
            )
        if config.streaming:
            # Nothing is downloaded before it is read.
            return ResolvedSource(config, ())
        dataset = open_dataset(config)
        # Cache files change whenever the dataset does.
        files = [Path(entry["filename"]) for entry in dataset.cache_files]
        if not files:
            raise DataError(
                "the dataset is in memory, so there are no files that would show its changes. Unset "
                "HF_DATASETS_IN_MEMORY_MAX_SIZE, or save it with `save_to_disk` and name the directory."
            )
        return ResolvedSource(config, tuple(map(_stat_file, files)), dataset)
    patterns = [config.files] if isinstance(config.files, str) else config.files or []
    # A file that several globs match is used once, at its first position.
    paths = list(dict.fromkeys(path for pattern in patterns for path in _expand_glob(pattern)))
    if all(get_file_kind(path) in _TEXT_SUFFIXES for path in paths):
        if config.format != "text" and any(get_file_kind(path) == ".txt" for path in paths):
            raise DataError(f"format={config.format} needs objects with fields, but .txt files have none: {paths[0]}.")
        named = [*config.fields.values(), *config.columns]
        if named:
            raise DataError(
                f".txt files have no fields such as {named[0]!r} (text_field, fields or columns), and "
                f"{config.location!r} matches no other files. Leave the field out."
            )
    return ResolvedSource(config, tuple(map(_stat_file, paths)))


def _expand_glob(pattern: str) -> list[Path]:
    if pattern == STDLIB:
        return _find_stdlib_files()
    matches = [Path(os.path.abspath(match)) for match in glob.glob(_escape_existing_prefix(pattern), recursive=True)]
    paths = sorted(path for path in matches if not path.is_dir())
    if not paths:
        hint = (
            f" {matches[0]} is a directory: add '/**/*.txt' or '/**/*.jsonl' to it, or name it under dataset if it "
            "holds a Hugging Face dataset."
            if matches
            else f" Relative globs start at {os.getcwd()}; ** matches directories of any depth."
        )
        raise DataError(f"corpus glob {pattern!r} matches no file.{hint}")
    for path in paths:
        if get_file_kind(path) not in SUFFIXES:
            raise DataError(
                f"corpus glob {pattern!r} matches {path}, whose suffix is {path.suffix!r}. Allowed: "
                f"{', '.join(SUFFIXES)}, optionally with .gz or .zst. Narrow the glob, for instance to '*.txt', or "
                "convert the file."
            )
    return paths


def _find_stdlib_files() -> list[Path]:
    root = sysconfig.get_paths()["stdlib"]
    paths = []
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = [name for name in subdirectories if name not in _STDLIB_EXCLUDED]
        paths += [Path(directory, name) for name in names if name.endswith(".py")]
    if not paths:
        raise DataError(
            f"corpus 'stdlib' is empty: no .py file under {root}. This Python has no source files; "
            "name a glob of .txt or .jsonl files instead."
        )
    return sorted(paths)


def _escape_existing_prefix(pattern: str) -> str:
    """Escape the leading parts of a glob that exist under exactly these names, such as `run[1]`."""
    path = Path(os.path.expanduser(pattern))
    prefix, parts = path.anchor or ".", list(path.parts[1:] if path.anchor else path.parts)
    while parts and os.path.lexists(os.path.join(prefix, parts[0])):
        prefix = os.path.join(prefix, parts.pop(0))
    return os.path.join(glob.escape(prefix), *parts)


def _stat_file(path: Path) -> SourceFile:
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error
    return SourceFile(path, status.st_size, status.st_mtime_ns)


# -- datasets of Hugging Face


def open_dataset(config: SourceConfig, *, streaming: bool = False) -> Any:
    """Open the split of a dataset, as a `datasets.Dataset`, or as an `IterableDataset` if `streaming` is set."""
    datasets = import_extra("datasets", f"the dataset {config.dataset!r}")
    directory = _find_dataset_directory(config)
    if directory is None and is_packaged_reader(datasets, str(config.dataset)):
        raise DataError(
            f"dataset {config.dataset!r} is a built-in reader of the library `datasets`, which would read the current "
            "directory. Name files under files, or the directory that holds them."
        )
    try:
        # `save_to_disk` writes one of these, for one split or several.
        if directory is not None and any((directory / name).is_file() for name in ("state.json", "dataset_dict.json")):
            dataset = _load_saved_dataset(datasets, config, directory)
            return dataset.to_iterable_dataset() if streaming else dataset
        path = str(directory or config.dataset)
        with restrict_data_files(import_extra("datasets.data_files", f"the dataset {path}"), path, directory):
            return datasets.load_dataset(
                path, config.name, split=config.split, revision=config.revision, streaming=streaming
            )
    except DataError:
        raise
    except Exception as error:  # readers and downloads of the library can raise any exception
        text = _first_line(error)
        if directory is not None:
            raise DataError(f"the dataset in {directory} cannot be opened: {text}.") from error
        at = "" if config.revision is None else f" at revision {config.revision!r}"
        raise DataError(
            f"the dataset {config.dataset!r}{at} cannot be loaded from the hub: {type(error).__name__}: {text}. Check "
            "its name, configuration, split and revision; without network access, save it with `save_to_disk` on a "
            "machine that has it, and name the directory."
        ) from error


def _find_dataset_directory(config: SourceConfig) -> Path | None:
    """Return the directory that a dataset names; None for a hub id."""
    named = str(config.dataset)
    path = Path(named).expanduser()
    if path.is_dir():
        if config.revision is not None:
            raise DataError(f"revision={config.revision!r} applies only to a hub dataset, but {path} is a directory.")
        return path.absolute()
    if path.is_file():
        raise DataError(f"dataset {named!r} is a file. Name it under files.")
    if named.startswith(("/", "~", ".")) or named.count("/") > 1:
        raise DataError(
            f"dataset {named!r} is neither a directory ({path.absolute()}) nor a hub id, which has the form "
            "'owner/name'."
        )
    return None


def _load_saved_dataset(datasets: Any, config: SourceConfig, directory: Path) -> Any:
    if config.name is not None:
        raise DataError(f"name={config.name!r} is a dataset configuration, but {directory} was saved without any.")
    found = datasets.load_from_disk(str(directory))
    if not isinstance(found, datasets.DatasetDict):
        saved = None if found.split is None else str(found.split)
        if config.split not in (saved, "train"):
            raise DataError(f"split={config.split!r}: {directory} holds one split{f', {saved}' if saved else ''}.")
        return found
    if config.split not in found:
        raise DataError(
            f"split={config.split!r}: {directory} has no such split.{suggest_match(config.split, found)} It has "
            f"{', '.join(found)}."
        )
    return found[config.split]


@contextmanager
def convert_dataset_errors(config: SourceConfig) -> Iterator[None]:
    """Convert every error that the library raises while rows are read into a DataError."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # readers and downloads of the library can raise any exception
        raise DataError(f"the dataset {config.dataset!r} cannot be read: {_first_line(error)}.") from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".") or type(error).__name__


def format_row_location(config: SourceConfig, number: int) -> str:
    return f"{config.dataset}[{config.split}]:{number}"

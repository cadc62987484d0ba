"""Find the documents of a corpus and read them, always in the same order.

Files come in the order of the globs and, within one glob, sorted by path. Documents without any text are left
out: they hold nothing to learn.
"""

from __future__ import annotations

import glob
import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base.errors import DataError, nearest

STDLIB = "stdlib"
_SUFFIXES = (".txt", ".jsonl")
_STDLIB_LEAVES_OUT = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"}
)


@dataclass(frozen=True)
class CorpusFile:
    """A file as it was found; size and time stand in for its content in cache keys."""

    path: Path
    """Absolute."""
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class Corpus:
    """The files of a corpus, in order; see `find_corpus`."""

    files: tuple[CorpusFile, ...]
    text_field: str

    def documents(self) -> Iterator[str]:
        """Yield each document that holds text; may be called again, and reads the files anew.

        Raises:
            DataError: a file cannot be read or decoded, or a line of a .jsonl file holds no text.
        """
        for file in self.files:
            yield from (text for text in self._read(file.path) if text)

    def check_unchanged(self) -> None:
        """Raise DataError if a file is no longer as it was found."""
        for file in self.files:
            if _found(file.path) != file:
                raise DataError(f"corpus file {file.path} changed while it was read. Start again when it is complete.")

    def _read(self, path: Path) -> Iterator[str]:
        try:
            if path.suffix == ".jsonl":
                yield from _read_lines(path, self.text_field)
            elif path.suffix == ".py":
                yield path.read_text(encoding="utf-8", errors="replace")
            else:
                yield _decoded(path.read_bytes(), str(path))
        except OSError as error:
            raise DataError(f"corpus file {path} cannot be read: {error.strerror or error}.") from error


def find_corpus(corpus: str | Sequence[str], text_field: str = "text") -> Corpus:
    """Find the files that `corpus` names.

    Args:
        corpus: "stdlib", or one or several globs; see `DataConfig.corpus`.
        text_field: the field of a .jsonl line that holds the document.

    Raises:
        DataError: a glob matches no file, or a file of another kind than .txt and .jsonl; or `text_field` is set
            and no file is .jsonl.
    """
    patterns = [corpus] if isinstance(corpus, str) else corpus
    # A file that several globs match is one file: dict keys keep the first place.
    paths = list(dict.fromkeys(path for pattern in patterns for path in _paths(pattern)))
    if text_field != "text" and not any(path.suffix == ".jsonl" for path in paths):
        raise DataError(
            f"text_field={text_field!r} names a field of .jsonl files, but corpus {corpus!r} has none. Leave it out."
        )
    return Corpus(tuple(_found(path) for path in paths), text_field)


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
    matches = [Path(os.path.abspath(match)) for match in glob.glob(os.path.expanduser(pattern), recursive=True)]
    paths = sorted(path for path in matches if not path.is_dir())
    if not paths:
        hint = (
            f" {matches[0]} is a directory: add '/**/*.txt' or '/**/*.jsonl' to it."
            if matches
            else f" Relative globs start at {os.getcwd()}; ** matches directories of any depth."
        )
        raise DataError(f"corpus glob {pattern!r} matches no file.{hint}")
    for path in paths:
        if path.suffix not in _SUFFIXES:
            raise DataError(
                f"corpus glob {pattern!r} matches {path}, whose suffix is {path.suffix!r}. Allowed: "
                f"{', '.join(_SUFFIXES)}. Narrow the glob, for instance to '*.txt', or convert the file."
            )
    return paths


def _found(path: Path) -> CorpusFile:
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"corpus file {path} cannot be read: {error.strerror or error}.") from error
    return CorpusFile(path, status.st_size, status.st_mtime_ns)


def _read_lines(path: Path, text_field: str) -> Iterator[str]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                where = f"{path}:{number}"
                yield _text_of(_decoded(line, where), text_field, where)


def _text_of(line: str, text_field: str, where: str) -> str:
    try:
        record: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        at = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise DataError(
            f"{where}: not valid JSON ({at}). Each line of a .jsonl file must be one "
            f'object, such as {{"{text_field}": "..."}}.'
        ) from None
    if not isinstance(record, dict):
        raise DataError(
            f"{where}: holds a JSON {type(record).__name__}. Each line of a .jsonl file must be one object, such as "
            f'{{"{text_field}": "..."}}.'
        )
    if text_field not in record:
        fields = ", ".join(sorted(record)) or "none"
        raise DataError(
            f"{where}: no field {text_field!r}. Fields of this line: {fields}.{nearest(text_field, record)} "
            "Set text_field to the one that holds the document."
        )
    text = record[text_field]
    if not isinstance(text, str):
        raise DataError(
            f"{where}: field {text_field!r} holds {text!r:.80}, a {type(text).__name__}, but must hold a string."
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: field {text_field!r} holds half of a surrogate pair, {text[error.start]!r}, at character "
            f"{error.start}; that is no text. Remove or repair it."
        ) from None
    return text


def _decoded(content: bytes, where: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: not UTF-8: byte 0x{content[error.start]:02x} at offset {error.start}. Convert it, for instance "
            "with `iconv -f latin1 -t utf-8`."
        ) from None

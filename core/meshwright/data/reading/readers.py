"""Read the objects of a file one after another, whatever kind of file it is.

Each reader yields values as the file has them, with the place of each ("chats.jsonl:17"), and holds a few at a time.
What is broken is an error with this place.
"""

from __future__ import annotations

import csv
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

from ...base.errors import DataError
from ..extras import extra
from ..progress import Meter
from .json_array import elements
from .opening import COMPRESSED, FREE, MOST_TIMES, kind_of, opened

Found = tuple[Any, str]
"""A value, and where it is."""


class Cells(dict[str, str]):
    """A row of a .csv file, in which numbers are text as everything is."""


MAX_BYTES = 1 << 30
"""Of one line, of one cell of a .csv file, or of one object in an array."""
_ROWS = 256
_CHUNK = 1 << 20


def read_file(path: Path, meter: Meter) -> Iterator[Found]:
    """Read a file of one of `KINDS`.

    Raises:
        DataError: the file cannot be read, or holds something else than its kind says, with the line.
    """
    with opened(path, meter) as file:
        yield from KINDS[kind_of(path)](file, path)


def _read_text(file: BinaryIO, path: Path) -> Iterator[Found]:
    yield {"text": decoded(_whole(file, path), str(path))}, str(path)


def _read_python(file: BinaryIO, path: Path) -> Iterator[Found]:
    text = _whole(file, path).decode("utf-8", errors="replace")
    # As a file that is opened as text.
    yield {"text": text.replace("\r\n", "\n").replace("\r", "\n")}, str(path)


def _whole(file: BinaryIO, path: Path) -> bytes:
    content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise DataError(f"{path}: a document of more than {MAX_BYTES:,} bytes. Cut it into several files.")
    return content


def _read_lines(file: BinaryIO, path: Path) -> Iterator[Found]:
    for number, line in _lines(file, path):
        if line.strip():
            where = f"{path}:{number}"
            yield parsed(decoded(line, where), where), where


def _lines(file: BinaryIO, path: Path) -> Iterator[tuple[int, bytes]]:
    number = 0
    while line := file.readline(MAX_BYTES):
        number += 1
        if len(line) == MAX_BYTES:
            raise DataError(
                f"{path}:{number}: a line of more than {MAX_BYTES:,} bytes. Each example is to have its own."
            )
        yield number, line


def parsed(line: str, where: str) -> Any:
    """The value of a line of JSON.

    Raises:
        DataError: it is none.
    """
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        at = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise DataError(
            f'{where}: not valid JSON ({at}). Each line of a .jsonl file must be one object, such as {{"text": "..."}}.'
        ) from None


def _read_array(file: BinaryIO, path: Path) -> Iterator[Found]:
    for value, line in elements(file, path, max_bytes=MAX_BYTES):
        yield value, f"{path}:{line}"


def _read_csv(file: BinaryIO, path: Path) -> Iterator[Found]:
    csv.field_size_limit(MAX_BYTES)
    rows = csv.reader((decoded(line, f"{path}:{number}") for number, line in _lines(file, path)), strict=True)
    names: list[str] = []
    line = 1
    try:
        for row in rows:
            if row and not names:
                names = row
                if len(set(names)) < len(names):
                    raise DataError(f"{path}:{line}: the header names a field twice: {', '.join(names)}.")
            elif row:
                if len(row) != len(names):
                    raise DataError(
                        f"{path}:{line}: {len(row)} fields, but the header names {len(names)}: {', '.join(names)}. "
                        "Quote fields that hold commas or ends of lines."
                    )
                yield Cells(zip(names, row, strict=True)), f"{path}:{line}"
            line = rows.line_num + 1
    except csv.Error as error:
        raise DataError(f"{path}:{line}: no row of a .csv file ({error}). Quote it as RFC 4180 says.") from None


def _read_parquet(file: BinaryIO, path: Path) -> Iterator[Found]:
    parquet, arrow = extra("pyarrow.parquet", f"reading {path}"), extra("pyarrow", f"reading {path}")
    with tempfile.TemporaryFile() as whole:
        if path.suffix.lower() in COMPRESSED:
            # Such a file is read from its end on.
            while chunk := file.read(_CHUNK):
                whole.write(chunk)
            whole.seek(0)
            file = whole
        number = 0
        try:
            table = parquet.ParquetFile(file)
            _check_expansion(table.metadata, path)
            for batch in table.iter_batches(batch_size=_ROWS):
                for row in batch.to_pylist():
                    yield row, f"{path}:row {number}"
                    number += 1
        except (arrow.ArrowException, OSError) as error:
            raise DataError(f"{path}: not a whole .parquet file, from row {number} on ({error}).") from error


def _check_expansion(metadata: Any, path: Path) -> None:
    """Refuse groups of rows that are far larger than their bytes in the file: a page is unpacked as a whole."""
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        columns = [group.column(each) for each in range(group.num_columns)]
        for each in columns:
            if each.total_uncompressed_size > max(FREE, MOST_TIMES * each.total_compressed_size):
                raise DataError(
                    f"{path}: {each.path_in_schema} is more than {MOST_TIMES} times as large as its bytes in the "
                    f"file. Write the file anew, without compression, if that is what it holds."
                )


KINDS: Mapping[str, Callable[[BinaryIO, Path], Iterator[Found]]] = MappingProxyType(
    {
        ".txt": _read_text,
        ".jsonl": _read_lines,
        ".json": _read_array,
        ".parquet": _read_parquet,
        ".csv": _read_csv,
        ".py": _read_python,
    }
)
SUFFIXES = tuple(suffix for suffix in KINDS if suffix != ".py")
"""Kinds of files that a glob may match; .py files are those of the standard library."""


def decoded(content: bytes, where: str) -> str:
    """The text of UTF-8, without a byte order mark.

    Raises:
        DataError: it is no UTF-8.
    """
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: not UTF-8: byte 0x{content[error.start]:02x} at offset {error.start}. Convert it, for instance "
            "with `iconv -f latin1 -t utf-8`."
        ) from None

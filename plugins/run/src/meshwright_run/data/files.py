"""Read the values of a file one by one, each with its location ("chats.jsonl:17"), with few of them in memory."""

from __future__ import annotations

import codecs
import csv
import gzip
import importlib
import io
import json
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

from meshwright.plugin import DataError, open_regular_file

from .content_check import check_is_text
from .progress import ReadProgress

LocatedValue = tuple[Any, str]
"""A value and its location."""

COMPRESSED = (".gz", ".zst")
MAX_BYTES = 1 << 30
"""Maximum size of a line, of a cell of a .csv file, of an object in an array, and of a text document."""
ALWAYS_ALLOWED_BYTES, MAX_EXPANSION_RATIO = 1 << 26, 500
"""Size to which any compressed file may expand, and maximum expansion ratio beyond it. Text shrinks to a tenth."""
_CHUNK = 1 << 20
_COMPRESSED_CHUNK = 1 << 12
"""Small, since its content may expand to 32,768 times its size."""
_ROWS_PER_BATCH = 256


class CsvRow(dict[str, str]):
    """A row of a .csv file; numbers are strings."""


def import_extra(module: str, purpose: str) -> Any:
    """Import a module of the extra `meshwright[data]`; `purpose` is the subject of the error message."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        raise DataError(
            f"{purpose} needs the package {name}, which cannot be imported ({error}). Install the packages for all "
            "data formats: pip install -e '.[data]' in a clone."
        ) from error


def get_file_kind(path: Path) -> str:
    """Return the suffix for a file's format, in lower case, without the suffix for its compression."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    return next((suffix for suffix in reversed(suffixes) if suffix not in COMPRESSED), "")


def read_file(path: Path, progress: ReadProgress) -> Iterator[LocatedValue]:
    """Yield the values of a file. A line that cannot be read yields a DataError as its value."""
    with open_decompressed(path, progress) as file:
        if (kind := get_file_kind(path)) != ".parquet":
            check_is_text(file, path)
        yield from READERS[kind](file, path)


@contextmanager
def open_decompressed(path: Path, progress: ReadProgress) -> Iterator[BinaryIO]:
    compression = path.suffix.lower()
    broken: tuple[type[Exception], ...] = (gzip.BadGzipFile, EOFError, zlib.error)
    zstandard = import_extra("zstandard", f"reading {path}") if compression == ".zst" else None
    if zstandard is not None:
        broken = (zstandard.ZstdError, EOFError)
    try:
        with open_regular_file(path) as file:
            progress.file = file
            if compression == ".gz":
                yield io.BufferedReader(_BoundedReader(gzip.GzipFile(fileobj=file), file), _CHUNK)
            elif zstandard is not None:
                yield io.BufferedReader(_BoundedReader(_ZstdReader(file, zstandard), file), _CHUNK)
            else:
                yield file
    except broken as error:
        raise DataError(
            f"{path}: the compressed content is corrupt or truncated ({error}). Compress or copy the file again."
        ) from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error


class _BoundedReader(io.RawIOBase):
    """Decompressed content of a file. Raises DataError once it is far larger than the file."""

    def __init__(self, content: Any, file: BinaryIO) -> None:
        self._content, self._file, self._bytes_read = content, file, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = int(self._content.readinto(memoryview(buffer)[:_CHUNK]))
        self._bytes_read += count
        if self._bytes_read > ALWAYS_ALLOWED_BYTES and self._bytes_read > MAX_EXPANSION_RATIO * self._file.tell():
            raise DataError(
                f"{getattr(self._file, 'name', 'the file')}: the decompressed content is more than "
                f"{MAX_EXPANSION_RATIO} times as large as the file. If that is correct, give the file without "
                "compression."
            )
        return count


class _ZstdReader(io.RawIOBase):
    """Content of consecutive Zstandard frames. The library's own reader accepts a truncated file as complete."""

    def __init__(self, file: BinaryIO, zstandard: Any) -> None:
        self._file, self._zstandard = file, zstandard
        self._frame: Any = None
        self._pending, self._content = b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._content:
            compressed = self._pending or self._file.read(_COMPRESSED_CHUNK)
            if not compressed:
                if self._frame is not None:
                    raise EOFError("a Zstandard frame is incomplete")
                return 0
            frame = self._frame or self._zstandard.ZstdDecompressor().decompressobj()
            self._content = memoryview(frame.decompress(compressed))
            self._pending = frame.unused_data
            self._frame = None if frame.eof else frame
        count = min(len(buffer), len(self._content))
        buffer[:count] = self._content[:count]
        self._content = self._content[count:]
        return count


# -- text, lines, tables


def _read_text(file: BinaryIO, path: Path) -> Iterator[LocatedValue]:
    content = _read_document(file, path)
    try:
        yield {"text": _decode_utf8(content, str(path))}, str(path)
    except DataError as error:
        yield error, str(path)


def _read_python(file: BinaryIO, path: Path) -> Iterator[LocatedValue]:
    text = _read_document(file, path).decode("utf-8", errors="replace")
    # As in a file that is opened in text mode.
    yield {"text": text.replace("\r\n", "\n").replace("\r", "\n")}, str(path)


def _read_document(file: BinaryIO, path: Path) -> bytes:
    content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise DataError(f"{path}: a document of more than {MAX_BYTES:,} bytes. Split it into several files.")
    return content


def _read_lines(file: BinaryIO, path: Path) -> Iterator[LocatedValue]:
    for number, line in _iter_lines(file, path):
        if line.strip():
            where = f"{path}:{number}"
            try:
                value = _parse_json_line(_decode_utf8(line, where), where)
            except DataError as error:
                value = error
            yield value, where


def _iter_lines(file: BinaryIO, path: Path) -> Iterator[tuple[int, bytes]]:
    number = 0
    while line := file.readline(MAX_BYTES):
        number += 1
        if len(line) == MAX_BYTES:
            raise DataError(
                f"{path}:{number}: a line of more than {MAX_BYTES:,} bytes. Each example must have its own line."
            )
        yield number, line


def _decode_utf8(content: bytes, where: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: not UTF-8: byte 0x{content[error.start]:02x} at offset {error.start}. Convert it, for instance "
            "with `iconv -f latin1 -t utf-8`."
        ) from None


def _parse_json_line(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        at = (
            f"{error.msg.removesuffix(' at')} at column {error.colno}"
            if isinstance(error, json.JSONDecodeError)
            else str(error)
        )
        advice = " A file that holds one array is a .json file: rename it." if line.lstrip().startswith("[") else ""
        raise DataError(
            f'{where}: not valid JSON ({at}). Each line of a .jsonl file must be one object, such as {{"text": "..."}}.'
            f"{advice}"
        ) from None


def _read_csv(file: BinaryIO, path: Path) -> Iterator[LocatedValue]:
    csv.field_size_limit(MAX_BYTES)
    rows = csv.reader((_decode_utf8(line, f"{path}:{number}") for number, line in _iter_lines(file, path)), strict=True)
    names: list[str] = []
    line = 1
    try:
        for row in rows:
            if row and not names:
                names = row
                if len(set(names)) < len(names):
                    raise DataError(f"{path}:{line}: the header names a field twice: {', '.join(names)}.")
                if len(names) == 1 and (separator := next((each for each in "\t;|" if each in names[0]), "")):
                    raise DataError(
                        f"{path}:{line}: the header {names[0]!r:.80} has no comma but {separator!r}. Fields of a .csv "
                        "file are separated by commas: convert it."
                    )
            elif row and len(row) != len(names):
                yield _build_row_length_error(f"{path}:{line}", row, names), f"{path}:{line}"
            elif row:
                yield CsvRow(zip(names, row, strict=True)), f"{path}:{line}"
            line = rows.line_num + 1
    except csv.Error as error:
        raise DataError(f"{path}:{line}: not a valid .csv row ({error}). Quote it as in RFC 4180.") from None


def _build_row_length_error(where: str, row: list[str], names: list[str]) -> DataError:
    return DataError(
        f"{where}: {len(row)} fields, but the header names {len(names)}: {', '.join(names)}. Quote fields that contain "
        "commas or line breaks."
    )


def _read_parquet(file: BinaryIO, path: Path) -> Iterator[LocatedValue]:
    parquet, arrow = import_extra("pyarrow.parquet", f"reading {path}"), import_extra("pyarrow", f"reading {path}")
    with tempfile.TemporaryFile() as decompressed:
        if path.suffix.lower() in COMPRESSED:
            # Parquet files are read from their end.
            while chunk := file.read(_CHUNK):
                decompressed.write(chunk)
            decompressed.seek(0)
            file = decompressed
        number = 0
        try:
            table = parquet.ParquetFile(file)
            _check_expansion(table.metadata, path)
            for batch in table.iter_batches(batch_size=_ROWS_PER_BATCH):
                for row in batch.to_pylist():
                    yield row, f"{path}:row {number}"
                    number += 1
        except (arrow.ArrowException, OSError) as error:
            raise DataError(f"{path}: not a valid .parquet file, from row {number} on ({error}).") from error


def _check_expansion(metadata: Any, path: Path) -> None:
    """Raise DataError for columns that are far larger than their bytes in the file: pages are decompressed at once."""
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for column in map(group.column, range(group.num_columns)):
            if column.total_uncompressed_size > max(
                ALWAYS_ALLOWED_BYTES, MAX_EXPANSION_RATIO * column.total_compressed_size
            ):
                raise DataError(
                    f"{path}: {column.path_in_schema} is more than {MAX_EXPANSION_RATIO} times as large as its bytes "
                    "in the file. If that is correct, write the file without compression."
                )


# -- JSON arrays


_ARRAY_CHUNK = 1 << 16
_END_MARGIN = 16
"""Number of characters, more than any literal, number or escape has. An error this close to the end of the text read so
far may come from the missing rest."""


def _read_array(file: BinaryIO, path: Path) -> Iterator[LocatedValue]:
    for value, line in iter_elements(file, path, max_bytes=MAX_BYTES):
        yield value, f"{path}:{line}"


def iter_elements(file: BinaryIO, path: Path, *, max_bytes: int) -> Iterator[tuple[Any, int]]:
    """Yield each element of the JSON array in a file, which is read in chunks, and the line where it starts."""
    text = _JsonArrayReader(file, path, max_bytes)
    first = text.peek()
    if first == "":
        return
    if first != "[":
        raise DataError(
            f"{path}:{text.line}: a .json file must hold an array of objects, [{{...}}, ...], but this one starts with "
            f"{first!r}. A file with one object per line is a .jsonl file: rename it."
        )
    text.skip(1)
    character = text.peek()
    while character != "]":
        yield text.read_element()
        character = text.peek()
        if character not in (",", "]"):
            raise text.invalid_json_error(
                f"expected ',' or ']' after an element, not {character or 'the end of the file'!r}"
            )
        if character == ",":
            text.skip(1)
            character = text.peek()
            if character == "]":
                raise text.invalid_json_error("a ',' before the ']'")
    text.skip(1)
    if character := text.peek():
        raise text.invalid_json_error(f"expected the end of the file after the array, not {character!r}")


class _JsonArrayReader:
    """The part of a file that was read but is not yet parsed; `line` is the line of the next character."""

    def __init__(self, file: BinaryIO, path: Path, max_bytes: int) -> None:
        self.line = 1
        self._file, self._path, self._max_bytes = file, path, max_bytes
        self._decode = codecs.getincrementaldecoder("utf-8-sig")().decode
        self._parse = json.JSONDecoder().raw_decode
        self._text, self._position, self._is_at_end = "", 0, False

    def peek(self) -> str:
        """Return the next non-blank character; "" at the end of the file."""
        while True:
            while self._position < len(self._text):
                if self._text[self._position] not in " \t\r\n":
                    return self._text[self._position]
                self.skip(1)
            if not self._read_more(_ARRAY_CHUNK):
                return ""

    def skip(self, count: int) -> None:
        self.line += self._text.count("\n", self._position, self._position + count)
        self._position += count

    def read_element(self) -> tuple[Any, int]:
        line = self.line
        while True:
            try:
                value, end = self._parse(self._text, self._position)
            except json.JSONDecodeError as error:
                cut = error.pos >= len(self._text) - _END_MARGIN or error.msg.startswith("Unterminated string")
                offset = error.pos - self._position
                # The text is doubled, so that a long element is parsed only a few times.
                if not cut or not self._read_more(max(_ARRAY_CHUNK, len(self._text) - self._position)):
                    self.skip(offset)
                    raise self.invalid_json_error(f"{error.msg}, in the element that starts in line {line}") from None
            except (ValueError, RecursionError) as error:
                raise self.invalid_json_error(str(error)) from None
            else:
                # A number may continue in the unread part, but is rejected later since it is not an object.
                self.skip(end - self._position)
                return value, line

    def invalid_json_error(self, problem: str) -> DataError:
        return DataError(f"{self._path}:{self.line}: not valid JSON ({problem}).")

    def _read_more(self, count: int) -> bool:
        if self._is_at_end:
            return False
        if len(self._text) - self._position > self._max_bytes:
            raise self.invalid_json_error(f"an element of more than {self._max_bytes:,} characters")
        content = self._file.read(count)
        self._is_at_end = not content
        try:
            self._text = self._text[self._position :] + self._decode(content, final=self._is_at_end)
        except UnicodeDecodeError as error:
            raise self.invalid_json_error(f"not UTF-8: byte 0x{error.object[error.start]:02x}") from None
        self._position = 0
        return not self._is_at_end


READERS: Mapping[str, Callable[[BinaryIO, Path], Iterator[LocatedValue]]] = MappingProxyType(
    {
        ".txt": _read_text,
        ".jsonl": _read_lines,
        ".json": _read_array,
        ".parquet": _read_parquet,
        ".csv": _read_csv,
        ".py": _read_python,
    }
)
SUFFIXES = tuple(suffix for suffix in READERS if suffix != ".py")
"""File formats that a glob may match; .py files come only from the standard library."""

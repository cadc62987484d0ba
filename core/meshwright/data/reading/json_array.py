"""Read the elements of one large JSON array, one at a time.

The library parses whole texts alone. So as much of the file is read as the next element needs: an element that seems
broken where the text that was read ends is tried again with more of it, any other is broken.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from ...base.errors import DataError

_CHUNK = 1 << 16
_BLANK = " \t\r\n"
_NEAR_THE_END = 16
"""Characters: longer than any literal, number or escape of which the end may be missing but the beginning is read; an
error in these last ones may be of what is missing."""


def elements(file: BinaryIO, path: Path, *, max_bytes: int) -> Iterator[tuple[Any, int]]:
    """Yield each element of the array that a file holds, and the line where it begins.

    Raises:
        DataError: the file holds no array, or an element is broken or longer than `max_bytes` characters.
    """
    text = _Text(file, path, max_bytes)
    first = text.next_character()
    if first == "":
        return
    if first != "[":
        raise DataError(
            f"{path}:{text.line}: a .json file must hold an array of objects, [{{...}}, ...], and this one begins with "
            f"{first!r}. A file of one object a line is a .jsonl file: rename it."
        )
    text.skip(1)
    character = text.next_character()
    while character != "]":
        yield text.element()
        character = text.next_character()
        if character not in (",", "]"):
            raise text.broken(f"expected ',' or ']' after an element, not {character or 'the end of the file'!r}")
        if character == ",":
            text.skip(1)
            character = text.next_character()
            if character == "]":
                raise text.broken("a ',' stands before the ']'")
    text.skip(1)
    if character := text.next_character():
        raise text.broken(f"expected the end of the file after the array, not {character!r}")


class _Text:
    """What has been read of a file, and where in it the reader is.

    Attributes:
        line: of the next character, from 1 on.
    """

    def __init__(self, file: BinaryIO, path: Path, max_bytes: int) -> None:
        self.line = 1
        self._file = file
        self._path = path
        self._max = max_bytes
        self._decode = codecs.getincrementaldecoder("utf-8-sig")().decode
        self._text = ""
        self._at = 0
        self._ended = False
        self._parse = json.JSONDecoder().raw_decode

    def next_character(self) -> str:
        """The next one that is not blank; empty at the end of the file."""
        while True:
            while self._at < len(self._text):
                if self._text[self._at] not in _BLANK:
                    return self._text[self._at]
                self.skip(1)
            if not self._more(_CHUNK):
                return ""

    def skip(self, count: int) -> None:
        self.line += self._text.count("\n", self._at, self._at + count)
        self._at += count

    def element(self) -> tuple[Any, int]:
        """The value that begins here, and its line."""
        line = self.line
        while True:
            try:
                value, end = self._parse(self._text, self._at)
            except json.JSONDecodeError as error:
                cut = error.pos >= len(self._text) - _NEAR_THE_END or error.msg.startswith("Unterminated string")
                offset = error.pos - self._at
                # Twice as much, or an element of many chunks would be tried as many times.
                if not cut or not self._more(max(_CHUNK, len(self._text) - self._at)):
                    self.skip(offset)
                    raise self.broken(f"{error.msg}, in the element that begins in line {line}") from None
            except (ValueError, RecursionError) as error:
                raise self.broken(str(error)) from None
            else:
                # What is no object may go on in what has not been read; it is refused as it is.
                self.skip(end - self._at)
                return value, line

    def broken(self, what: str) -> DataError:
        return DataError(f"{self._path}:{self.line}: not valid JSON ({what}).")

    def _more(self, count: int) -> bool:
        """Read about so many bytes more; whether there were any."""
        if self._ended:
            return False
        if len(self._text) - self._at > self._max:
            raise self.broken(f"an element of more than {self._max:,} characters")
        content = self._file.read(count)
        self._ended = not content
        try:
            self._text = self._text[self._at :] + self._decode(content, final=self._ended)
        except UnicodeDecodeError as error:
            raise self.broken(f"not UTF-8: byte 0x{error.object[error.start]:02x}") from None
        self._at = 0
        return not self._ended

"""Recognize files that are not UTF-8 text although their suffix says so."""

from __future__ import annotations

import io
from pathlib import Path
from typing import BinaryIO

from meshwright.plugin import DataError

_BYTE_ORDER_MARKS = {b"\xff\xfe\x00\x00": "utf-32", b"\x00\x00\xfe\xff": "utf-32"}
_BYTE_ORDER_MARKS |= {b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
_SIGNATURES = {
    b"PAR1": "a Parquet file: give it the suffix .parquet",
    b"\x1f\x8b": "compressed with gzip: add the suffix .gz",
    b"\x28\xb5\x2f\xfd": "compressed with Zstandard: add the suffix .zst",
    b"PK\x03\x04": "a zip archive, such as an .xlsx file: extract it, or export it as .csv",
    b"ARROW1": "an Arrow file: convert it to .parquet",
}
"""First bytes of files that are often named for another format."""


def check_is_text(file: BinaryIO, path: Path) -> None:
    """Raise DataError if the first bytes of a file show that it is another format, or not UTF-8."""
    if not isinstance(file, io.BufferedReader):
        return
    start = file.peek(4)
    for signature, what in _SIGNATURES.items():
        if start.startswith(signature):
            raise DataError(f"{path} is not text, but {what}.")
    encoding = next((each for mark, each in _BYTE_ORDER_MARKS.items() if start.startswith(mark)), "")
    if not encoding and start[:2].count(0) == 1:
        encoding = "utf-16be" if start[:1] == b"\x00" else "utf-16le"
    if encoding:
        raise DataError(
            f"{path} is not UTF-8, but {encoding.upper()}. Convert it: iconv -f {encoding} -t utf-8 {path.name} > "
            f"utf8-{path.name}"
        )

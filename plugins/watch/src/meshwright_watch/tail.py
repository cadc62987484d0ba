"""Files of lines that grow while they are read: each complete line is returned once, in order.

A file may be truncated, written anew or replaced by another (a run that resumes replaces its metrics as a whole): then
reading begins anew. A line without its end is left for later, since its writer may be within it.
"""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.plugin import open_regular

LONGEST = 1 << 22
"""Bytes of a line that is read at once; longer ones are left out."""
_KNOWN = 64
"""So many bytes before the offset must be as they were; else the file was written anew."""


@dataclass(frozen=True)
class Part:
    """What was new in a file.

    Attributes:
        is_new: reading has begun anew, and what was read before is void.
        lines: complete ones, without their ends.
        has_more: more can be read at once.
    """

    is_new: bool
    lines: list[bytes]
    has_more: bool = False


class Tail:
    """Read one file from where reading has stopped.

    Args:
        path: the file, which need not exist.
        window: read at most so many bytes at the end of the file; None: all of it.

    Attributes:
        offset: bytes that were read.
        size: bytes of the file when it was last looked at.
    """

    def __init__(self, path: Path, *, window: int | None = None) -> None:
        self.path = path
        self._window = window
        self._file_id: tuple[int, int] | None = None
        self._before = b""
        self._mark: tuple[int, ...] = ()
        self.offset = self.size = 0
        self._is_within = False
        """Whether reading resumes within a line that is left out."""

    def read(self, most: int) -> Part:
        """Return what was written since the last time, up to `most` bytes (or one line, if that is longer)."""
        try:
            # Of a thousand files few have grown, and stat is cheaper than open.
            if _mark(self.path.stat()) == self._mark:
                return Part(False, [])
            with open_regular(self.path) as file:
                status = os.fstat(file.fileno())
                self.size = status.st_size
                is_new = self._has_changed((status.st_dev, status.st_ino), file)
                if is_new:
                    self.offset, self._before, self._is_within = 0, b"", False
                self._file_id = (status.st_dev, status.st_ino)
                if self._window is not None and self.size - self.offset > self._window:
                    # Most likely within a line.
                    self.offset, self._before, self._is_within = self.size - self._window, b"", True
                file.seek(self.offset)
                content = file.read(most)
                while content and b"\n" not in content and len(content) < LONGEST and (rest := file.read(most)):
                    content += rest
        except OSError:
            # It does not exist, or no longer.
            is_new = self._file_id is not None
            self._file_id, self.offset, self.size, self._before, self._mark = None, 0, 0, b"", ()
            return Part(is_new, [])
        # There is more of what was left for later only if the file grows.
        self._mark = _mark(status) if self.offset + len(content) >= self.size else ()
        end = content.rfind(b"\n") + 1
        if not end and len(content) < LONGEST:
            return Part(is_new, [])
        skips, self._is_within = self._is_within, not end
        end = end or len(content)
        self.offset += end
        self._before = (self._before + content[:end])[-_KNOWN:]
        lines = [] if self._is_within else content[: end - 1].split(b"\n")
        return Part(is_new, lines[1:] if skips else lines, len(content) >= most and self.offset < self.size)

    def _has_changed(self, file_id: tuple[int, int], file: Any) -> bool:
        if self._file_id is None:
            return False
        if file_id != self._file_id or self.size < self.offset:
            return True
        file.seek(self.offset - len(self._before))
        return bool(file.read(len(self._before)) != self._before)


def _mark(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def parse_lines(lines: list[bytes]) -> tuple[list[dict[str, Any]], int]:
    """Return the JSON objects of lines, and how many lines hold none, as after a crash of their writer."""
    lines = [line for line in lines if line.strip()]
    try:
        values = json.loads(b"[" + b",".join(lines) + b"]")
    except (ValueError, RecursionError):
        values = []
    if len(values) != len(lines):
        values = [_parsed(line) for line in lines]
    found = [value for value in values if isinstance(value, dict)]
    return found, len(lines) - len(found)


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def number(value: Any) -> float | None:
    """Return a value as a number; null stands for what is not finite, and what is no number is None."""
    if value is None:
        return math.nan
    if type(value) in (int, float):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    return None


def is_finite(value: Any) -> bool:
    """Whether a value is a finite number."""
    return (found := number(value)) is not None and math.isfinite(found)


def numbered_files(directory: Path, pattern: str, most: int) -> dict[int, Path]:
    """Return the files of a directory whose names match, by the number in them, up to so many."""
    try:
        found = {int(match[1]): path for path in directory.iterdir() if (match := re.fullmatch(pattern, path.name))}
    except OSError:
        return {}
    return {number: found[number] for number in sorted(found)[:most]}

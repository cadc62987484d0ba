"""Read files of lines while they grow, and keep metrics by step in columns, which are downsampled for charts.

A file may be truncated, rewritten or replaced (a run that resumes replaces its metrics file): reading then starts over.
A line without a line end is read later, since its writer may not have finished it. If a file returns to an earlier
step, later lines replace earlier ones, as in `meshwright_run.metrics_report.read_metrics`: a killed run resumes from
its last checkpoint.

[Note: buckets] Of each bucket of steps, the lowest and the highest value are drawn, so spikes stay visible. A bucket
has 2**k steps and starts at a multiple of its size, so drawn points do not move while a run continues. Non-finite
values are gaps.
"""

from __future__ import annotations

import bisect
import json
import math
import os
import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.plugin import open_regular_file

from .smoothing import smooth

MAX_LINE_BYTES = 1 << 22  # Bytes; longer lines are skipped
_CHECKED_BYTES = 64  # Bytes before the offset that are compared to detect a rewritten file


@dataclass(frozen=True)
class TailChunk:
    """New content of a file."""

    is_restarted: bool  # reading has started over; discard what was read before
    lines: list[bytes]  # complete lines, without line ends
    has_more: bool = False  # whether more can be read immediately


class FileTail:
    """Reader of a growing file, which need not exist. `window`: read at most this many bytes at the end of a file."""

    def __init__(self, path: Path, *, window: int | None = None) -> None:
        self.path = path
        self._window = window
        self._file_id: tuple[int, int] | None = None
        self._last_bytes = b""
        self._file_state: tuple[int, ...] = ()
        self.offset = self.size = 0
        self._is_inside_skipped_line = False
        """Whether the offset is inside a line that is skipped."""

    def read(self, max_bytes: int) -> TailChunk:
        """Return what was appended since the last call, up to `max_bytes` bytes (or one line, if that is longer)."""
        try:
            # Most files have not grown, and stat is cheaper than open.
            if _get_file_state(self.path.stat()) == self._file_state:
                return TailChunk(False, [])
            with open_regular_file(self.path) as file:
                status = os.fstat(file.fileno())
                self.size = status.st_size  # bytes of the file when it was last opened
                is_new = self._has_changed((status.st_dev, status.st_ino), file)
                if is_new:
                    self.offset, self._last_bytes, self._is_inside_skipped_line = 0, b"", False
                self._file_id = (status.st_dev, status.st_ino)
                if self._window is not None and self.size - self.offset > self._window:
                    # The new offset is most likely inside a line.
                    self.offset, self._last_bytes, self._is_inside_skipped_line = self.size - self._window, b"", True
                file.seek(self.offset)
                content = file.read(max_bytes)
                while (
                    content
                    and b"\n" not in content
                    and len(content) < MAX_LINE_BYTES
                    and (rest := file.read(max_bytes))
                ):
                    content += rest
        except OSError:
            is_new = self._file_id is not None  # a file that was read before is gone
            self._file_id, self.offset, self.size, self._last_bytes, self._file_state = None, 0, 0, b"", ()
            return TailChunk(is_new, [])
        # An incomplete line is completed only if the file grows.
        self._file_state = _get_file_state(status) if self.offset + len(content) >= self.size else ()
        end = content.rfind(b"\n") + 1
        if not end and len(content) < MAX_LINE_BYTES:
            return TailChunk(is_new, [])
        skips, self._is_inside_skipped_line = self._is_inside_skipped_line, not end
        end = end or len(content)
        self.offset += end
        self._last_bytes = (self._last_bytes + content[:end])[-_CHECKED_BYTES:]
        lines = [] if self._is_inside_skipped_line else content[: end - 1].split(b"\n")
        return TailChunk(is_new, lines[1:] if skips else lines, len(content) >= max_bytes and self.offset < self.size)

    def _has_changed(self, file_id: tuple[int, int], file: Any) -> bool:
        if self._file_id is None:
            return False
        if file_id != self._file_id or self.size < self.offset:
            return True
        file.seek(self.offset - len(self._last_bytes))
        return bool(file.read(len(self._last_bytes)) != self._last_bytes)


def _get_file_state(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def parse_lines(lines: list[bytes]) -> tuple[list[dict[str, Any]], int]:
    """Return the JSON objects in lines, and the number of lines without one, as after a crash of the writer."""
    lines = [line for line in lines if line.strip()]
    try:
        values = json.loads(b"[" + b",".join(lines) + b"]")
    except (ValueError, RecursionError):
        values = []
    if len(values) != len(lines):
        values = [_parse_or_none(line) for line in lines]
    found = [value for value in values if isinstance(value, dict)]
    return found, len(lines) - len(found)


def _parse_or_none(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def to_float(value: Any) -> float | None:
    """Return a JSON value as a float: null is NaN, since non-finite values are stored as null; None if not a number."""
    if value is None:
        return math.nan
    if type(value) in (int, float):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    return None


def is_finite(value: Any) -> bool:
    return (found := to_float(value)) is not None and math.isfinite(found)


def list_numbered_files(directory: Path, pattern: str, limit: int) -> dict[int, Path]:
    """Return at most `limit` files of a directory whose names match `pattern`, by the number in their names."""
    try:
        found = {int(match[1]): path for path in directory.iterdir() if (match := re.fullmatch(pattern, path.name))}
    except OSError:
        return {}
    return {number: found[number] for number in sorted(found)[:limit]}


MAX_COLUMNS = 2000  # More columns are omitted: a page cannot show the norms of thousands of blocks
MAX_POINTS = 4000  # Maximum number of points of a line
STEP_KEY = "step"


class MetricColumns:
    """Metrics as float64 columns, each with the steps at which it has a value."""

    def __init__(self) -> None:
        self._columns: dict[str, tuple[array[int], array[float]]] = {}
        self.version = 0  # increases with each change
        self.last_step = 0  # 0 if there is none
        self.has_omitted_columns = False  # whether there were more names than `MAX_COLUMNS`

    @property
    def names(self) -> list[str]:
        """Names of the columns in order of appearance; those of a group are "group/name"."""
        return [name for name, (steps, _) in self._columns.items() if steps]

    def clear(self) -> None:
        self._columns.clear()
        self.version += 1
        self.last_step = 0

    def add(self, records: Sequence[Mapping[str, Any]]) -> int:
        """Add records of a metrics file, and return the number of records without a step of at least 1."""
        # JavaScript represents integers exactly only up to 2**53.
        found = [record for record in records if type(step := record.get(STEP_KEY)) is int and 1 <= step < 1 << 53]
        begin = 0
        for index, record in enumerate(found):
            before = found[index - 1][STEP_KEY] if index > begin else self.last_step
            if record[STEP_KEY] <= before:
                self._extend(found[begin:index])
                self._truncate(record[STEP_KEY])
                begin = index
        self._extend(found[begin:])
        self.version += len(found)
        return len(records) - len(found)

    def _extend(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Add records of ascending steps, column by column: most lines have the same keys."""
        if records:
            steps = array("q", [record[STEP_KEY] for record in records])
            self._add_columns("", steps, records)
            self.last_step = steps[-1]

    def _add_columns(self, prefix: str, steps: array[int], records: Sequence[Mapping[str, Any]]) -> None:
        signatures = dict.fromkeys(map(tuple, records))
        for name in dict.fromkeys(name for names in signatures for name in names):
            if not prefix and name == STEP_KEY:
                continue
            at, values = steps, [record[name] for record in records if name in record]
            if len(signatures) > 1:
                at = array("q", [step for step, record in zip(steps, records, strict=True) if name in record])
            types = set(map(type, values))
            if dict in types:
                groups = [place for place, value in enumerate(values) if type(value) is dict]
                of_groups = array("q", [at[place] for place in groups])
                self._add_columns(f"{prefix}{name}/", of_groups, [values[place] for place in groups])
            if not types <= {float, int}:
                numbers = [to_float(value) for value in values]
                at = array("q", [step for step, value in zip(at, numbers, strict=True) if value is not None])
                values = [value for value in numbers if value is not None]
            if values:
                self._append(f"{prefix}{name}", at, values)

    def _append(self, name: str, steps: array[int], values: Sequence[float]) -> None:
        if name not in self._columns:
            if len(self._columns) >= MAX_COLUMNS:
                self.has_omitted_columns = True
                return
            self._columns[name] = (array("q"), array("d"))
        column = self._columns[name]
        column[0].extend(steps)
        try:
            column[1].extend(array("d", values))
        except OverflowError:
            # An int exceeds the range of float.
            column[1].extend(found for value in values if (found := to_float(value)) is not None)

    def _truncate(self, step: int) -> None:
        """Remove the values of this step and later ones."""
        for steps, values in self._columns.values():
            index = bisect.bisect_left(steps, step)
            del steps[index:], values[index:]

    def get_column(self, name: str, low: int | None = None, high: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return copies of the steps, int64 (N), in a span (see `slice_steps`) and their values, float64 (N)."""
        steps, values = self._columns.get(name, (array("q"), array("d")))
        at = np.array(steps, dtype=np.int64)
        part = slice_steps(at, low, high)
        return at[part], np.array(values, dtype=np.float64)[part]

    def get_last(self, name: str) -> float | None:
        _, values = self._columns.get(name, ((), ()))
        return values[-1] if values else None

    def get_series(
        self, names: list[str], low: int | None, high: int | None, points: int, *, smoothing: float = 0.0
    ) -> dict[str, Any]:
        """Return columns within a span of steps, each downsampled separately; JSON-serializable.

        Args:
            smoothing: weight of the exponential moving average of all steps; 0: none is returned.
        """
        found: dict[str, dict[str, Any]] = {}
        for name in names:
            all_steps, all_values = self.get_column(name)
            part = slice_steps(all_steps, low, high)
            steps, values = all_steps[part], all_values[part]
            indices = choose_points(steps, values, min(points, MAX_POINTS))
            found[name] = {"x": steps[indices].tolist(), "y": to_json_list(values[indices]), "count": len(steps)}
            if smoothing:
                found[name]["smooth"] = to_json_list(smooth(all_values, smoothing)[part][indices])
        return found

    def get_aligned(self, by: str, names: list[str], low: int | None, high: int | None, points: int) -> dict[str, Any]:
        """Return columns at the steps that are chosen for the column `by`, so that they can be stacked."""
        steps, values = self.get_column(by, low, high)
        at = steps[choose_points(steps, values, min(points, MAX_POINTS))]
        found: dict[str, list[float | None]] = {}
        for name in names:
            own_steps, numbers = self.get_column(name)
            if not len(own_steps):
                found[name] = [None] * len(at)
                continue
            indices = np.minimum(np.searchsorted(own_steps, at), len(own_steps) - 1)
            found[name] = to_json_list(np.where(own_steps[indices] == at, numbers[indices], np.nan))
        return {"x": at.tolist(), "columns": found, "count": len(steps)}


def bucket_width(low: int, high: int, buckets: int) -> int:
    """Return the size of a bucket in steps: the smallest power of two with at most `buckets` buckets in low..high."""
    wide = 1
    while high // wide - low // wide + 1 > buckets:
        wide *= 2
    return wide


def slice_steps(steps: np.ndarray, low: int | None, high: int | None) -> slice:
    """Return the slice of ascending steps from `low` to `high`, plus one step on either side, where lines end."""
    start = 0 if low is None else int(np.searchsorted(steps, low, "left"))
    stop = len(steps) if high is None else int(np.searchsorted(steps, high, "right"))
    return slice(max(0, start - 1), min(len(steps), stop + 1))


def choose_points(steps: np.ndarray, values: np.ndarray, points: int) -> np.ndarray:
    """Return the ascending indices, int64, of about `points` points to draw; see [Note: buckets]."""
    if len(steps) <= max(points, 2):
        return np.arange(len(steps))
    buckets = steps // bucket_width(int(steps[0]), int(steps[-1]), max(1, points // 2))
    starts = np.flatnonzero(np.diff(buckets, prepend=buckets[0] - 1))
    bucket_of = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(steps)))
    is_finite = np.isfinite(values)
    lowest = np.minimum.reduceat(np.where(is_finite, values, np.inf), starts)
    highest = np.maximum.reduceat(np.where(is_finite, values, -np.inf), starts)
    found = [np.array([0, len(steps) - 1])]
    for wanted in (is_finite & (values == lowest[bucket_of]), is_finite & (values == highest[bucket_of]), ~is_finite):
        indices = np.flatnonzero(wanted)  # the first of each bucket
        found.append(indices[np.flatnonzero(np.diff(bucket_of[indices], prepend=-1))])
    return np.unique(np.concatenate(found))


def to_json_list(values: np.ndarray) -> list[float | None]:
    return [value if ok else None for value, ok in zip(values.tolist(), np.isfinite(values).tolist(), strict=True)]

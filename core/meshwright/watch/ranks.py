"""What each rank says of itself: one file a rank, of which only the end is read, and only when somebody looks."""

from __future__ import annotations

import itertools
import math
import re
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from ..train.run.stragglers import stragglers
from .columns import Columns
from .downsample import plain
from .tail import Tail, number, parse_lines

MAX_RANKS = 1024
"""Files of further ranks are not read."""
WINDOW = 1 << 14
"""Bytes at the end of a file, for a rank's last steps."""
LAST = 50
"""Steps."""
_FILE = re.compile(r"(\d{1,9})\.jsonl")
_WHOLE = 1 << 26
"""Bytes of the file of one rank, of which all is read when its history is asked for."""
_SECONDS = "seconds"


class _Rank:
    """The last steps of one rank.

    Attributes:
        steps: their numbers, ascending.
        seconds: of each, for the whole step and by part.
        memory: of the last, in bytes by kind.
    """

    def __init__(self, path: Path) -> None:
        self._tail = Tail(path, window=WINDOW)
        self._records: deque[dict[str, Any]] = deque(maxlen=LAST)
        self.memory: dict[str, float] = {}
        self.seconds: list[dict[str, float]] = []

    @property
    def last_step(self) -> int:
        return self._records[-1]["step"] if self._records else 0

    def refresh(self) -> None:
        part = self._tail.read(WINDOW)
        if part.is_new:
            self._records.clear()
        records = [each for each in parse_lines(part.lines)[0] if type(each.get("step")) is int]
        for record in records:
            while self._records and self._records[-1]["step"] >= record["step"]:
                self._records.pop()
            self._records.append(record)
        if records or part.is_new:
            self.memory = _numbers(self._records[-1].get("memory")) if self._records else {}
            self.seconds = [_seconds(record) for record in self._records]


def _seconds(record: dict[str, Any]) -> dict[str, float]:
    return _numbers({_SECONDS: record.get(_SECONDS)} | _object(record.get("times")))


class Ranks:
    """The ranks of one run.

    Args:
        directory: with a file for each.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._ranks: dict[int, _Rank] = {}
        self._whole: tuple[int, Tail, Columns] | None = None

    def files(self) -> dict[int, Path]:
        """Those that are there, of the first `MAX_RANKS` ranks."""
        try:
            names = [path.name for path in self._directory.iterdir()]
        except OSError:
            return {}
        found = {int(match[1]): name for name in names if (match := _FILE.fullmatch(name))}
        return {rank: self._directory / found[rank] for rank in sorted(found)[:MAX_RANKS]}

    def look(self, last: int = LAST) -> dict[str, Any]:
        """Memory and seconds of all ranks, values of JSON: lists are by rank, null where a rank has none.

        Args:
            last: over so many steps.
        """
        files = self.files()
        self._ranks = {rank: self._ranks.get(rank) or _Rank(path) for rank, path in files.items()}
        for each in self._ranks.values():
            each.refresh()
        ranks = list(self._ranks)
        seconds = [each.seconds[-last:] for each in self._ranks.values()]
        memory = [each.memory for each in self._ranks.values()]
        parts = _names(step for each in seconds for step in each)
        spans = {part: _over(seconds, part) for part in parts}
        medians = {part: span[1] for part, span in spans.items()}
        whole = medians.get(_SECONDS, np.array([]))
        step_seconds = float(np.nanmedian(whole)) if np.isfinite(whole).any() else 0.0
        slow = [each for part in parts for each in stragglers(ranks, part, medians[part], step_seconds=step_seconds)]
        return {
            "ranks": ranks,
            "steps": [each.last_step for each in self._ranks.values()],
            "last": last,
            "parts": {
                part: dict(zip(("low", "median", "high"), map(plain, span), strict=True))
                for part, span in spans.items()
            },
            "memory": {kind: plain(np.array([each.get(kind, math.nan) for each in memory])) for kind in _names(memory)},
            "stragglers": [
                {
                    "rank": each.rank,
                    "part": each.part,
                    "seconds": each.seconds,
                    "middle": each.middle,
                    "deviations": each.deviations if math.isfinite(each.deviations) else None,
                }
                for each in slow[:100]
            ],
        }

    def history(self, rank: int, low: int | None, high: int | None, points: int) -> dict[str, Any] | None:
        """Seconds and memory of one rank within some steps, values of JSON; None: it has no file.

        What was read of its file is kept until another rank is asked for.
        """
        path = self.files().get(rank)
        if path is None:
            return None
        if self._whole is None or self._whole[0] != rank:
            self._whole = rank, Tail(path, window=_WHOLE), Columns()
        _, tail, columns = self._whole
        part = tail.read(_WHOLE)
        if part.is_new:
            columns.clear()
        columns.add(parse_lines(part.lines)[0])
        return {"rank": rank, "series": columns.series(columns.names, low, high, points)}


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _numbers(value: Any) -> dict[str, float]:
    """Those of an object that are finite."""
    return {
        name: found
        for name, each in _object(value).items()
        if (found := number(each)) is not None and math.isfinite(found)
    }


def _names(records: Iterable[dict[str, float]]) -> list[str]:
    return list(dict.fromkeys(itertools.chain.from_iterable(dict.fromkeys(map(tuple, records)))))


def _over(seconds: list[list[dict[str, float]]], part: str) -> np.ndarray:
    """Lowest, median and highest of each rank's steps, float64 (3, R); NaN for a rank that has none."""
    longest = max((len(each) for each in seconds), default=0)
    table = np.full((len(seconds), max(1, longest)), np.nan)
    for row, steps in zip(table, seconds, strict=True):
        row[: len(steps)] = [step.get(part, math.nan) for step in steps]
    # What is missing comes last.
    table.sort(axis=1)
    count, row = np.isfinite(table).sum(axis=1), np.arange(len(seconds))
    middle = (table[row, np.maximum(count - 1, 0) // 2] + table[row, count // 2 % table.shape[1]]) / 2
    return np.array([table[:, 0], middle, table[row, np.maximum(count - 1, 0)]])

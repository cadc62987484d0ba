"""What each rank reports: one file a rank, of which only the end is read, and only when somebody looks."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from meshwright_run.stragglers import stragglers

from .columns import Columns, plain
from .tail import Tail, is_finite, number, numbered_files, parse_lines

MAX_RANKS = 1024
"""Files of further ranks are not read."""
WINDOW = 1 << 14
"""Bytes at the end of a file, for a rank's last steps."""
LAST = 50
"""Steps."""
_WHOLE = 1 << 26
"""Bytes of the file of one rank, all of which is read for its history."""
_SECONDS = "seconds"


class _Rank:
    """The last steps of one rank.

    Attributes:
        seconds: of each step, for the whole and by part.
        memory: of the last step, in bytes by kind.
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
            self.seconds = [
                _numbers({_SECONDS: each.get(_SECONDS)}) | _numbers(each.get("times")) for each in self._records
            ]


class Ranks:
    """The ranks of one run, by a directory with a file for each."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._ranks: dict[int, _Rank] = {}
        self._whole: tuple[int, Tail, Columns] | None = None

    def files(self) -> dict[int, Path]:
        return numbered_files(self._directory, r"(\d{1,9})\.jsonl", MAX_RANKS)

    def look(self, last: int = LAST) -> dict[str, Any]:
        """Return memory and seconds of all ranks over their last steps, as values of JSON.

        Lists are by rank, null where a rank has none.
        """
        self._ranks = {rank: self._ranks.get(rank) or _Rank(path) for rank, path in self.files().items()}
        for each in self._ranks.values():
            each.refresh()
        ranks = list(self._ranks)
        seconds = [each.seconds[-last:] for each in self._ranks.values()]
        memory = [each.memory for each in self._ranks.values()]
        spans = {part: _over(seconds, part) for part in _names(step for each in seconds for step in each)}
        whole = spans[_SECONDS][1] if _SECONDS in spans else np.array([])
        step_seconds = float(np.nanmedian(whole)) if np.isfinite(whole).any() else 0.0
        slow = [
            asdict(each)
            for part, span in spans.items()
            for each in stragglers(ranks, part, span[1], step_seconds=step_seconds)
        ]
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
                each | {"deviations": each["deviations"] if math.isfinite(each["deviations"]) else None}
                for each in slow[:100]
            ],
        }

    def history(self, rank: int, low: int | None, high: int | None, points: int) -> dict[str, Any] | None:
        """Return seconds and memory of one rank within some steps, as values of JSON; None: it has no file.

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


def _numbers(value: Any) -> dict[str, float]:
    """The finite numbers of an object."""
    items = value.items() if isinstance(value, dict) else ()
    return {name: found for name, each in items if is_finite(each) and (found := number(each)) is not None}


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

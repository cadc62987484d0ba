"""What each rank says of itself: one file a rank, of which only the end is read, and only when somebody looks."""

from __future__ import annotations

import math
import re
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

from .columns import Columns
from .downsample import chosen, plain
from .stragglers import stragglers
from .tail import Tail, number, parse_lines

MAX_RANKS = 1024
"""Files of further ranks are not read."""
WINDOW = 1 << 14
"""Bytes at the end of a file, for a rank's last steps."""
LAST = 50
"""Steps."""
_FILE = re.compile(r"(\d{1,9})\.jsonl")
_WHOLE = 1 << 26
"""Bytes of the file of one rank, read as a whole when its history is asked for."""
_SECONDS = "seconds"


class _Rank:
    """The last steps of one rank."""

    def __init__(self, path: Path) -> None:
        self._tail = Tail(path, window=WINDOW)
        self._steps: deque[dict[str, Any]] = deque(maxlen=LAST)

    def refresh(self) -> None:
        part = self._tail.read(WINDOW)
        if part.is_new:
            self._steps.clear()
        records, _ = parse_lines(part.lines)
        for record in records:
            step = record.get("step")
            if type(step) is not int:
                continue
            while self._steps and self._steps[-1]["step"] >= step:
                self._steps.pop()
            self._steps.append(record)

    @property
    def last_step(self) -> int:
        return self._steps[-1]["step"] if self._steps else 0

    @property
    def memory(self) -> dict[str, float]:
        """Of the last step, in bytes by kind."""
        return _numbers(self._steps[-1].get("memory")) if self._steps else {}

    def seconds(self, last: int) -> dict[str, list[float]]:
        """Of the last steps, for the whole step and by part."""
        found: dict[str, list[float]] = {}
        for record in list(self._steps)[-last:]:
            parts = {_SECONDS: record.get(_SECONDS), **_numbers(record.get("times"))}
            for name, value in parts.items():
                if (each := number(value)) is not None and math.isfinite(each):
                    found.setdefault(name, []).append(each)
        return found


class Ranks:
    """The ranks of one run.

    Args:
        directory: with a file for each.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._ranks: dict[int, _Rank] = {}

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
        seconds = [each.seconds(last) for each in self._ranks.values()]
        memory = [each.memory for each in self._ranks.values()]
        parts = list(dict.fromkeys(name for each in seconds for name in each))
        medians = {part: _over(seconds, part, np.median) for part in parts}
        whole = medians.get(_SECONDS, np.array([]))
        step_seconds = float(np.nanmedian(whole)) if np.isfinite(whole).any() else 0.0
        slow = [each for part in parts for each in stragglers(ranks, part, medians[part], step_seconds=step_seconds)]
        return {
            "ranks": ranks,
            "steps": [each.last_step for each in self._ranks.values()],
            "last": last,
            "parts": {
                part: {
                    "median": plain(medians[part]),
                    "low": plain(_over(seconds, part, np.min)),
                    "high": plain(_over(seconds, part, np.max)),
                }
                for part in parts
            },
            "memory": {
                kind: plain(np.array([each.get(kind, math.nan) for each in memory]))
                for kind in dict.fromkeys(name for each in memory for name in each)
            },
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

    def history(self, rank: int, points: int) -> dict[str, Any] | None:
        """Seconds and memory of one rank over all steps, values of JSON; None: it has no file."""
        path = self.files().get(rank)
        if path is None:
            return None
        columns = Columns()
        for record in parse_lines(Tail(path, window=_WHOLE).read(_WHOLE).lines)[0]:
            columns.add(record)
        found = {}
        for name in columns.names:
            steps, values = columns.column(name)
            places = chosen(steps, values, points)
            found[name] = {"x": steps[places].tolist(), "y": plain(values[places]), "count": len(steps)}
        return {"rank": rank, "series": found}


def _numbers(value: Any) -> dict[str, float]:
    given = value if isinstance(value, dict) else {}
    return {name: found for name, each in given.items() if (found := number(each)) is not None}


def _over(seconds: list[dict[str, list[float]]], part: str, of: Any) -> np.ndarray:
    return np.array([float(of(each[part])) if part in each else math.nan for each in seconds])

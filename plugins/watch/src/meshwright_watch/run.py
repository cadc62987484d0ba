"""State of one run and its ranks, read from its directory: only new data, and only on request."""

from __future__ import annotations

import itertools
import json
import math
import os
import socket
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from meshwright.plugin import ConfigError, parse_json, parse_yaml, read_regular_file
from meshwright_run.observers import find_stragglers
from meshwright_run.run_directory import EVENTS, LOCK_OWNER, METRICS, RANK_LOGS, RUN_FILE, SUMMARY, RunDirectory

from .metric_columns import FileTail, MetricColumns, is_finite, list_numbered_files, parse_lines, to_float, to_json_list

MAX_RANKS = 1024  # Files of more ranks are not read
WINDOW = 1 << 14  # Bytes that are read at the end of a rank's file, for its last steps
NUM_RECENT_STEPS = 50  # Steps of each rank that are summarized
_HISTORY_BYTES = 1 << 26  # Maximum number of bytes of a rank's file that are read for its history
_SECONDS, _SPAN_NAMES = "seconds", ("low", "median", "high")


class _RankTail:
    """The last steps of one rank."""

    def __init__(self, path: Path) -> None:
        self._tail = FileTail(path, window=WINDOW)
        self._records: deque[dict[str, Any]] = deque(maxlen=NUM_RECENT_STEPS)
        self.memory: dict[str, float] = {}  # of the last step, in bytes by kind
        self.seconds: list[dict[str, float]] = []  # of each step, in total and by part

    @property
    def last_step(self) -> int:
        return self._records[-1]["step"] if self._records else 0

    def refresh(self) -> None:
        part = self._tail.read(WINDOW)
        if part.is_restarted:
            self._records.clear()
        records = [each for each in parse_lines(part.lines)[0] if type(each.get("step")) is int]
        for record in records:
            while self._records and self._records[-1]["step"] >= record["step"]:
                self._records.pop()
            self._records.append(record)
        if records or part.is_restarted:
            self.memory = _parse_numbers(self._records[-1].get("memory")) if self._records else {}
            totals = [_parse_numbers({_SECONDS: each.get(_SECONDS)}) for each in self._records]
            self.seconds = [
                one | _parse_numbers(each.get("times")) for one, each in zip(totals, self._records, strict=True)
            ]


class RankMetrics:
    """Metrics of the ranks of a run, read from a directory with one file per rank."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._ranks: dict[int, _RankTail] = {}
        self._history: tuple[int, FileTail, MetricColumns] | None = None

    def list_files(self) -> dict[int, Path]:
        return list_numbered_files(self._directory, r"(\d{1,9})\.jsonl", MAX_RANKS)

    def summarize(self, num_steps: int = NUM_RECENT_STEPS) -> dict[str, Any]:
        """Return memory and seconds of all ranks over their last steps, as lists by rank."""
        self._ranks = {rank: self._ranks.get(rank) or _RankTail(path) for rank, path in self.list_files().items()}
        for each in self._ranks.values():
            each.refresh()
        ranks = list(self._ranks)
        seconds = [each.seconds[-num_steps:] for each in self._ranks.values()]
        memory = [each.memory for each in self._ranks.values()]
        spans = {
            part: _min_median_max(seconds, part) for part in _collect_names(step for each in seconds for step in each)
        }
        totals = spans[_SECONDS][1] if _SECONDS in spans else np.array([])
        step_seconds = float(np.nanmedian(totals)) if np.isfinite(totals).any() else 0.0
        medians = [(part, span[1]) for part, span in spans.items()]
        slow = [each for part, values in medians for each in find_stragglers(ranks, part, values, step_s=step_seconds)]
        return {
            "ranks": ranks,
            "steps": [each.last_step for each in self._ranks.values()],
            "last": num_steps,
            "parts": {
                part: dict(zip(_SPAN_NAMES, map(to_json_list, span), strict=True)) for part, span in spans.items()
            },
            "memory": {
                kind: to_json_list(np.array([each.get(kind, math.nan) for each in memory]))
                for kind in _collect_names(memory)
            },
            "stragglers": [asdict(each) | {"deviations": _finite_or_none(each.deviations)} for each in slow[:100]],
        }

    def get_history(self, rank: int, low: int | None, high: int | None, points: int) -> dict[str, Any] | None:
        """Return seconds and memory of a rank within a span of steps; None if it has no file. Caches one rank."""
        path = self.list_files().get(rank)
        if path is None:
            return None
        if self._history is None or self._history[0] != rank:
            self._history = rank, FileTail(path, window=_HISTORY_BYTES), MetricColumns()
        _, tail, columns = self._history
        part = tail.read(_HISTORY_BYTES)
        if part.is_restarted:
            columns.clear()
        columns.add(parse_lines(part.lines)[0])
        return {"rank": rank, "series": columns.get_series(columns.names, low, high, points)}


def _parse_numbers(value: Any) -> dict[str, float]:
    items = value.items() if isinstance(value, dict) else ()
    return {name: found for name, each in items if is_finite(each) and (found := to_float(each)) is not None}


def _collect_names(records: Iterable[dict[str, float]]) -> list[str]:
    return list(dict.fromkeys(itertools.chain.from_iterable(dict.fromkeys(map(tuple, records)))))


def _min_median_max(seconds: list[list[dict[str, float]]], part: str) -> np.ndarray:
    """Return minimum, median and maximum over the steps of each rank, float64 (3, R); NaN for a rank without values."""
    table = np.full((len(seconds), max(1, max((len(each) for each in seconds), default=0))), np.nan)
    for row, steps in zip(table, seconds, strict=True):
        row[: len(steps)] = [step.get(part, math.nan) for step in steps]
    table.sort(axis=1)  # NaN is sorted last
    count, row = np.isfinite(table).sum(axis=1), np.arange(len(seconds))
    middle = (table[row, np.maximum(count - 1, 0) // 2] + table[row, count // 2 % table.shape[1]]) / 2
    return np.array([table[:, 0], middle, table[row, np.maximum(count - 1, 0)]])


RUN_FILES = (METRICS, EVENTS, SUMMARY, RUN_FILE, LOCK_OWNER, RANK_LOGS)  # A run directory has at least one of these
MAX_READ_BYTES = 1 << 22  # Bytes of metrics that are read at once
MAX_EVENTS = 20_000
MAX_EVENT_BYTES = 1 << 14  # Bytes; longer events are skipped


class WatchedRun:
    """A run, read from its directory, which may still be empty. `name`: its name on the page."""

    def __init__(self, directory: Path, name: str) -> None:
        self.directory = directory.resolve()
        self.name = name
        _check_run_directory(self.directory, directory)
        self.lock = Lock()
        """Hold it while refreshing or reading."""
        self.metrics = MetricColumns()
        self.events: list[dict[str, Any]] = []
        paths = RunDirectory(self.directory)
        self.ranks, self.timeline_directory = RankMetrics(paths.rank_logs), paths.timeline
        self._metrics_tail, self._events_tail = FileTail(paths.metrics), FileTail(paths.events)
        self._events_version = 0
        self._num_unreadable = 0
        self._file_cache: dict[str, tuple[tuple[int, int, int], Any]] = {}

    def refresh(self, max_bytes: int = MAX_READ_BYTES) -> bool:
        """Read new data, and return whether more can be read immediately."""
        part = self._metrics_tail.read(max_bytes)
        if part.is_restarted:
            self.metrics.clear()
            self._num_unreadable = 0
        records, incomplete = parse_lines(part.lines)
        self._num_unreadable += incomplete + self.metrics.add(records)
        events = self._events_tail.read(max_bytes)
        if events.is_restarted:
            self.events.clear()
        lines = [line for line in events.lines if len(line) <= MAX_EVENT_BYTES]
        found = [each for each in parse_lines(lines)[0] if isinstance(each.get("event"), str)]
        if found or events.is_restarted:
            self._events_version += 1
            self.events = [*self.events, *found][-MAX_EVENTS:]
        return part.has_more or events.has_more

    def load_settings(self) -> dict[str, Any]:
        found = self._read(RUN_FILE, parse_yaml)
        return found if isinstance(found, dict) else {}

    def _read(self, name: str, parse: Any) -> Any:
        """Return the parsed content of a small file, cached until it changes; None if it cannot be read."""
        path = self.directory / name
        try:
            status = path.stat()
            mark = (status.st_ino, status.st_size, status.st_mtime_ns)
            known = self._file_cache.get(name)
            if known is None or known[0] != mark:
                known = self._file_cache[name] = (mark, parse(read_regular_file(path).decode()))
        except (OSError, ValueError, RecursionError):
            return None
        return known[1]

    def get_state(self) -> dict[str, Any]:
        """Return a summary for the page, with versions that change with new data; JSON-serializable."""
        metrics, start, settings = self.metrics, self._last_event("start"), self.load_settings()
        state, why = self._find_status()
        versions = {
            "metrics": metrics.version,
            "events": self._events_version,
            "timeline": _last_write_ms(self.timeline_directory),
            "settings": self._file_cache[RUN_FILE][0][2] // 1_000_000 if settings else 0,
        }
        evaluation = settings.get("eval")
        texts = {name: _to_text(start.get(name)) for name in ("strategy", "mesh", "device")}
        return self._empty_state() | {
            **texts,
            "state": state,
            "reason": why,
            "step": metrics.last_step,
            "steps": _int_or_none(start.get("num_steps")) or _int_or_none(settings.get("steps")),
            "strategy": texts["strategy"] or _to_text(settings.get("strategy")),
            "world_size": _int_or_none(start.get("world_size")),
            "parameters": _int_or_none(start.get("num_parameters")),
            "meshwright": _to_text(start.get("version")),
            "names": metrics.names,
            "last": {
                name: _finite_or_none(metrics.get_last(name)) for name in metrics.names if not name.startswith("norms/")
            },
            "has_omitted_columns": metrics.has_omitted_columns,
            "num_unreadable": self._num_unreadable,
            "read": [self._metrics_tail.offset, self._metrics_tail.size],
            "versions": versions,
            "has_ranks": RunDirectory(self.directory).rank_logs.is_dir(),
            "has_timeline": self.timeline_directory.is_dir(),
            "has_settings": bool(settings),
            "eval_every": _int_or_none(evaluation.get("every")) if isinstance(evaluation, dict) else None,
        }

    def get_error_state(self, error: Exception) -> dict[str, Any]:
        """Return the state of a run with a file that cannot be read for an unexpected reason; JSON-serializable."""
        return self._empty_state() | {"state": "failed", "reason": f"its files cannot be read ({type(error).__name__})"}

    def _empty_state(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "directory": str(self.directory),
            **dict.fromkeys(("state", "reason", "strategy", "mesh", "device", "meshwright"), ""),
            **dict.fromkeys(("steps", "world_size", "parameters", "eval_every")),
            "step": 0,
            "names": [],
            "last": {},
            "num_unreadable": 0,
            "read": [0, 0],
            "versions": {"metrics": 0, "events": 0, "timeline": 0, "settings": 0},
            **dict.fromkeys(("has_omitted_columns", "has_ranks", "has_timeline", "has_settings"), False),
        }

    def _last_event(self, *events: str) -> dict[str, Any]:
        return next((each for each in reversed(self.events) if each["event"] in events), {})

    def _find_status(self) -> tuple[str, str]:
        """Return whether the run is waiting, running, done, stopped, failed or lost, and the reason."""
        end = self._last_event("start", "end", "fault", "exit")
        holder = self._read(LOCK_OWNER, parse_json)
        is_held = isinstance(holder, dict)
        is_dead = is_held and _has_holder_exited(holder)
        match end.get("event"):
            case "exit":
                fault = self._last_event("fault")
                return "failed", _format_fault(fault) if fault else f"exit code {_to_text(end.get('code'))}"
            case "end":
                reason = _to_text(end.get("reason"))
                return {"done": "done", "early stopping": "done", "failed": "failed"}.get(reason, "stopped"), reason
            case "fault":
                return "failed", _format_fault(end)
        if is_held and not is_dead:
            return "running", ""
        if self._read(SUMMARY, parse_json) is not None:
            return "done", ""
        if is_dead:
            return "lost", "its process ended without reporting why"
        if self.metrics.names:
            return "stopped", ""
        return "waiting", "no output yet: start a run with this directory as its output_dir"


def open_runs(directories: Sequence[Path]) -> list[WatchedRun]:
    """Return the runs in directories, without duplicates, named by the shortest ends of their paths that differ."""
    given = list({directory.resolve(): directory for directory in directories}.values())
    parts = [directory.resolve().parts for directory in given]
    names = []
    for own in parts:
        length = next((n for n in range(1, len(own)) if sum(other[-n:] == own[-n:] for other in parts) == 1), len(own))
        names.append("/".join(own[-length:]))
    return [WatchedRun(directory, name) for directory, name in zip(given, names, strict=True)]


def _check_run_directory(directory: Path, original: Path) -> None:
    if not directory.is_dir():
        near = _find_runs(original.parent) if original.parent.is_dir() else []
        reported = f" Runs next to it: {', '.join(map(str, near[:8]))}." if near else ""
        raise ConfigError(f"{str(original)!r} is not a run directory.{reported} Give the output_dir of a run.")
    if _is_run_directory(directory):
        return
    inside = _find_runs(original)
    if inside:
        raise ConfigError(
            f"{str(original)!r} is not a run directory, but contains {len(inside)}. Name the runs to watch: "
            f"meshwright watch {' '.join(map(str, inside[:4]))}{' ...' if len(inside) > 4 else ''}"
        )
    if any(original.iterdir()):
        raise ConfigError(
            f"{str(original)!r} is not a run directory: it contains none of {', '.join(RUN_FILES)}. Give the "
            "output_dir of a run."
        )


def _find_runs(directory: Path) -> list[Path]:
    return [path for path in sorted(directory.glob("*")) if _is_run_directory(path)]


def _is_run_directory(directory: Path) -> bool:
    return any((directory / name).exists() for name in RUN_FILES)


def _has_holder_exited(holder: dict[str, Any]) -> bool:
    """Return whether the process that holds the lock of the directory ran on this machine, and has ended."""
    pid = holder.get("pid")
    if type(pid) is not int or pid <= 0 or holder.get("host") != socket.gethostname():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        return False
    return False


def _last_write_ms(directory: Path) -> int:
    """Return the time of the last write in a directory [ms], which JavaScript represents exactly."""
    try:
        return max((path.stat().st_mtime_ns // 1_000_000 for path in directory.iterdir()), default=0)
    except OSError:
        return 0


def _format_fault(event: dict[str, Any]) -> str:
    return f"{_to_text(event.get('error_type'))}: {_to_text(event.get('message'))}"


def _int_or_none(value: Any) -> int | None:
    return value if type(value) is int else None


def _to_text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else json.dumps(value)


def _finite_or_none(value: float | None) -> float | None:
    return value if value is not None and np.isfinite(value) else None

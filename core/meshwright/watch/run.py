"""One run as its directory tells of it. Nothing is read before somebody asks, and then only what is new."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from ..base.errors import ConfigError
from ..files.parsing import MAX_BYTES, open_regular, parse_json, parse_yaml
from ..train.run.run_directory import EVENTS, HOLDER, METRICS, RANKS, RUN, SUMMARY, RunDirectory
from .columns import Columns
from .ranks import Ranks
from .tail import Tail, parse_lines

PARTS = (METRICS, EVENTS, SUMMARY, RUN, HOLDER, RANKS)
"""What a directory of a run has, or some of it."""
AT_ONCE = 1 << 22
"""Bytes of metrics that are read at once."""
MAX_EVENTS = 20_000
MAX_EVENT = 1 << 14
"""Bytes of one; longer ones are left out."""
_TURNS = ("start", "end", "fault", "exit")
"""Events that begin or end a sitting."""


class WatchedRun:
    """A run's directory.

    Args:
        directory: that of a run, or one in which a run is about to begin.
        name: how the page calls it.

    Raises:
        ConfigError: it is no directory, or holds other things.
    """

    def __init__(self, directory: Path, name: str) -> None:
        self.directory = directory.resolve()
        self.name = name
        _check(self.directory, directory)
        self.lock = Lock()
        """For who refreshes or reads."""
        self.metrics = Columns()
        self.events: list[dict[str, Any]] = []
        self.paths = RunDirectory(self.directory)
        self.ranks = Ranks(self.paths.ranks)
        self._lines, self._event_lines = Tail(self.paths.metrics), Tail(self.paths.events)
        self._events_version = 0
        self._unread = 0
        self._texts: dict[str, tuple[tuple[int, int, int], Any]] = {}

    @property
    def timeline(self) -> Path:
        """Where the timelines are."""
        return self.paths.timeline

    # -- what is new

    def refresh(self, most: int = AT_ONCE) -> bool:
        """Read what was written since the last time; whether there is more to be read at once."""
        part = self._lines.read(most)
        if part.is_new:
            self.metrics.clear()
            self._unread = 0
        records, torn = parse_lines(part.lines)
        self._unread += torn + self.metrics.add(records)
        told = self._event_lines.read(most)
        if told.is_new:
            self.events.clear()
        lines = [line for line in told.lines if len(line) <= MAX_EVENT]
        found = [each for each in parse_lines(lines)[0] if isinstance(each.get("event"), str)]
        if found or told.is_new:
            self._events_version += 1
            self.events = [*self.events, *found][-MAX_EVENTS:]
        return part.has_more or told.has_more

    def settings(self) -> dict[str, Any]:
        """The run file; {} where there is none."""
        found = self._read(RUN, parse_yaml)
        return found if isinstance(found, dict) else {}

    def _read(self, name: str, parse: Any) -> Any:
        """A small file, read again when it has changed; None where it cannot be."""
        path = self.directory / name
        try:
            status = path.stat()
            mark = (status.st_ino, status.st_size, status.st_mtime_ns)
            known = self._texts.get(name)
            if known is None or known[0] != mark:
                known = self._texts[name] = (mark, parse(_small_text(path)))
        except (OSError, ValueError, RecursionError):
            return None
        return known[1]

    # -- what is told

    def state(self) -> dict[str, Any]:
        """What the page shows first, and what tells it whether there is news; values of JSON."""
        metrics, start = self.metrics, self._last("start")
        settings = self.settings()
        state, why = self._condition()
        read, size = self._lines.offset, self._lines.size
        return {
            "name": self.name,
            "directory": str(self.directory),
            "state": state,
            "why": why,
            "step": metrics.last_step,
            "steps": _int(start.get("steps")) or _int(settings.get("steps")),
            "strategy": _text(start.get("strategy")) or _text(settings.get("strategy")),
            "mesh": _text(start.get("mesh")),
            "world_size": _int(start.get("world_size")),
            "parameters": _int(start.get("parameters")),
            "device": _text(start.get("device")),
            "meshwright": _text(start.get("version")),
            "names": metrics.names,
            "last": {name: _finite(metrics.last(name)) for name in metrics.names if not name.startswith("norms/")},
            "left_out": metrics.left_out,
            "unread": self._unread,
            "read": [read, size],
            "versions": {
                "metrics": metrics.version,
                "events": self._events_version,
                "timeline": _newest(self.timeline),
            },
            "has_ranks": self.paths.ranks.is_dir(),
            "has_timeline": self.timeline.is_dir(),
        }

    def unreadable(self, error: Exception) -> dict[str, Any]:
        """The state of a run of whose files one has something that nobody has thought of; values of JSON."""
        nothing = dict.fromkeys(("steps", "world_size", "parameters"))
        return {
            "name": self.name,
            "directory": str(self.directory),
            "state": "failed",
            "why": f"its files cannot be read ({type(error).__name__})",
            "step": 0,
            **nothing,
            **dict.fromkeys(("strategy", "mesh", "device", "meshwright"), ""),
            "names": [],
            "last": {},
            "left_out": False,
            "unread": 0,
            "read": [0, 0],
            "versions": {"metrics": 0, "events": 0, "timeline": 0},
            "has_ranks": False,
            "has_timeline": False,
        }

    def _last(self, event: str) -> dict[str, Any]:
        return next((each for each in reversed(self.events) if each["event"] == event), {})

    def _condition(self) -> tuple[str, str]:
        """Whether the run is waiting, running, done, stopped, failed or gone, and what there is to say of it."""
        end: dict[str, Any] = next((each for each in reversed(self.events) if each["event"] in _TURNS), {})
        holder = self._read(HOLDER, parse_json)
        is_held, is_dead = isinstance(holder, dict), isinstance(holder, dict) and _is_dead(holder)
        if end.get("event") == "exit":
            fault = self._last("fault")
            told = f"{_text(fault.get('kind'))}: {_text(fault.get('message'))}" if fault else ""
            return "failed", told or f"exit code {_text(end.get('code'))}"
        if end.get("event") == "end":
            reason = _text(end.get("reason"))
            return {"done": "done", "early stopping": "done", "failed": "failed"}.get(reason, "stopped"), reason
        if is_held and not is_dead and end.get("event") != "fault":
            return "running", ""
        if end.get("event") == "fault":
            return "failed", f"{_text(end.get('kind'))}: {_text(end.get('message'))}"
        if self._read(SUMMARY, parse_json) is not None:
            return "done", ""
        if is_dead:
            return "gone", "its process ended without a word"
        if not self.metrics.names:
            return "waiting", "nothing is written yet"
        return "stopped", ""


def watched(directories: Sequence[Path]) -> list[WatchedRun]:
    """The runs of some directories, each once, with names that differ: as much of their paths as that takes.

    Raises:
        ConfigError: one is no directory of a run.
    """
    given = list({directory.resolve(): directory for directory in directories}.values())
    parts = [directory.resolve().parts for directory in given]
    names = []
    for own in parts:
        length = next((n for n in range(1, len(own)) if sum(other[-n:] == own[-n:] for other in parts) == 1), len(own))
        names.append("/".join(own[-length:]))
    return [WatchedRun(directory, name) for directory, name in zip(given, names, strict=True)]


def _check(directory: Path, given: Path) -> None:
    if not directory.is_dir():
        near = (
            [path for path in sorted(given.parent.glob("*")) if looks_like_run(path)] if given.parent.is_dir() else []
        )
        told = f" Runs beside it: {', '.join(map(str, near[:8]))}." if near else ""
        raise ConfigError(f"{str(given)!r} is no directory of a run.{told} Give the output_dir of a run.")
    if looks_like_run(directory):
        return
    inside = [path for path in sorted(given.iterdir()) if looks_like_run(path)]
    if inside:
        raise ConfigError(
            f"{str(given)!r} is no run, but holds {len(inside)}. Name those to watch: "
            f"meshwright watch {' '.join(map(str, inside[:4]))}{' ...' if len(inside) > 4 else ''}"
        )
    if any(given.iterdir()):
        raise ConfigError(
            f"{str(given)!r} holds none of {', '.join(PARTS)}: it is no directory of a run. Give the output_dir of one."
        )


def looks_like_run(directory: Path) -> bool:
    """Whether a directory has what a run leaves."""
    return any((directory / name).exists() for name in PARTS)


def _small_text(path: Path) -> str:
    with open_regular(path) as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES} bytes")
    return content.decode()


def _is_dead(holder: dict[str, Any]) -> bool:
    """Whether the process that has said that it holds the directory is of this machine, and no longer there."""
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


def _newest(directory: Path) -> int:
    """When something in a directory was last written [ms], which a page's numbers hold."""
    try:
        return max((path.stat().st_mtime_ns // 1_000_000 for path in directory.iterdir()), default=0)
    except OSError:
        return 0


def _int(value: Any) -> int | None:
    return value if type(value) is int else None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else json.dumps(value)


def _finite(value: float | None) -> float | None:
    return value if value is not None and np.isfinite(value) else None

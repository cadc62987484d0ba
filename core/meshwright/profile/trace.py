"""Read a trace of torch.profiler: JSON of Chrome's format, gzipped or not. No torch in this module."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base.errors import ConfigError
from ..files.parsing import open_regular
from .spans import Span

MAX_BYTES = 1 << 30
"""Of a trace, unpacked: reading it takes some ten times as much memory."""
ABOUT = "meshwright"
"""Under which key of a trace it says what run, rank and steps it is of."""
_MICRO = 1e-6
_ASK = "Give a run directory, its directory `profile`, or a file rank-*.json.gz in it."


@dataclass(frozen=True)
class MemoryChange:
    """Memory that was taken (bytes above 0) or given back.

    Attributes:
        at: seconds, on the clock of the spans.
        total: bytes that were held after it and had been taken since the profile began; of an accelerator, all.
        is_on_device: whether it is an accelerator's memory.
    """

    at: float
    bytes: int
    total: int
    thread: int | str
    is_on_device: bool


@dataclass(frozen=True)
class Trace:
    """What one rank's profiler has seen.

    Attributes:
        about: what the run has said of itself; empty where another program has written the trace.
        memory: in the order of time; empty where it was not asked for.
    """

    path: Path
    spans: Sequence[Span]
    about: Mapping[str, Any]
    memory: Sequence[MemoryChange]


def read_trace(path: Path) -> Trace:
    """Read a trace.

    Raises:
        ConfigError: the file cannot be read, or is no trace.
    """
    value = read_json(path)
    events = value.get("traceEvents") if isinstance(value, dict) else None
    if not isinstance(events, list):
        raise ConfigError(f"{path} is no trace of torch.profiler: it has no list traceEvents. {_ASK}")
    try:
        spans = [_span(event) for event in events if event.get("ph") == "X" and "dur" in event]
        memory = [_change(event) for event in events if event.get("name") == "[memory]"]
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"{path} is no trace of torch.profiler: an event of it is malformed ({type(error).__name__}: {error}). "
            f"{_ASK}"
        ) from None
    if not spans:
        raise ConfigError(f"{path} holds no event that lasts, so there is nothing to show. {_ASK}")
    about = value.get(ABOUT)
    memory.sort(key=lambda change: change.at)
    return Trace(path, spans, about if isinstance(about, dict) else {}, memory)


def read_json(path: Path) -> Any:
    """The value of a JSON file, gzipped or not.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        with open_regular(path) as raw:
            is_packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            file = gzip.GzipFile(fileobj=raw) if is_packed else raw
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}. {_ASK}") from None
    except (EOFError, zlib.error) as error:
        raise ConfigError(f"cannot unpack {path}, which seems to be cut off: {error}. Record it anew.") from None
    if len(content) > MAX_BYTES:
        raise ConfigError(
            f"{path} holds more than {MAX_BYTES:,} bytes. Open it in Perfetto, or record fewer steps (profile.steps)."
        )
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no trace of torch.profiler: it is not JSON ({error}). {_ASK}") from None


def _span(event: Mapping[str, Any]) -> Span:
    start, details = float(event["ts"]) * _MICRO, event.get("args") or {}
    return Span(
        name=str(event["name"]),
        kind=str(event.get("cat", "")),
        start=start,
        end=start + float(event["dur"]) * _MICRO,
        thread=event.get("tid", 0),
        operator=int(details.get("External id", 0)),
        details=details,
    )


def _change(event: Mapping[str, Any]) -> MemoryChange:
    details = event["args"]
    return MemoryChange(
        at=float(event["ts"]) * _MICRO,
        bytes=int(details["Bytes"]),
        total=int(details["Total Allocated"]),
        thread=event.get("tid", 0),
        # Kineto numbers kinds of devices as torch does: 0 is the CPU.
        is_on_device=int(details["Device Type"]) != 0,
    )

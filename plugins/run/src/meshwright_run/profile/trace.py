"""Read a trace of torch.profiler: JSON of Chrome's format, gzipped or not. No torch in this module."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from meshwright.plugin import MARK, WAIT, ConfigError, open_regular

OPERATOR, ANNOTATION, KERNEL = "cpu_op", "user_annotation", "kernel"
"""Kinds of spans, as Kineto's categories."""
ON_DEVICE = (KERNEL, "gpu_memcpy", "gpu_memset")
"""Kinds of an accelerator's work."""
MAX_BYTES = 1 << 30
"""Of a trace, unpacked: reading it takes some ten times as much memory."""
ABOUT = "meshwright"
"""The key of a trace that says what run, rank and steps it is of."""

_STEP = re.compile(rf"(?:{MARK}step |ProfilerStep#)(\d+)$")
_SENDS = ("c10d::", "_c10d_functional::", "_c10d_functional_autograd::", "c10d_functional::")
"""Operators that issue communication, or wait for it."""
_WRAPPERS = ("autograd::", "torch::autograd::", "profiler::")
"""Operators that do nothing themselves, and may wait for something within."""
_COMPILED = ("Torch-Compiled Region", "## Call CompiledFxGraph")
_MICRO = 1e-6
_ASK = "Give a run directory, its directory `profile`, or a file rank-*.json.gz in it."


class Span(NamedTuple):
    """One event with a duration; a tuple, since a step has thousands.

    Attributes:
        kind: Kineto's category: an operator, an annotation (`record_function`), a kernel, ...
        start, end: seconds since any moment, the same of all spans.
        thread: where it ran; of an accelerator, its stream.
        operator: number of the operator that it is, or that has launched it; 0: none is known.
    """

    name: str
    kind: str
    start: float
    end: float
    thread: int | str = 0
    operator: int = 0
    details: Mapping[str, Any] = MappingProxyType({})

    @property
    def is_communication(self) -> bool:
        """Whether it is a message under way: a kernel of NCCL, a collective of gloo, or a wait for other ranks."""
        if self.kind == KERNEL:
            return self.name.startswith("nccl")
        return self.kind == ANNOTATION and (self.name.startswith("gloo:") or self.name == WAIT)

    @property
    def sends(self) -> bool:
        return self.kind == OPERATOR and self.name.startswith(_SENDS)

    @property
    def computes(self) -> bool:
        if self.kind not in (OPERATOR, ANNOTATION):
            return False
        if self.name.startswith(_COMPILED):
            return True
        return self.kind == OPERATOR and "::" in self.name and not self.name.startswith((*_SENDS, *_WRAPPERS))

    @property
    def step(self) -> int | None:
        found = _STEP.match(self.name) if self.kind == ANNOTATION else None
        return int(found[1]) if found else None

    @property
    def part(self) -> str | None:
        is_mark = self.kind == ANNOTATION and self.name.startswith(MARK)
        if not is_mark or self.name == WAIT or self.step is not None:
            return None
        return self.name.removeprefix(MARK)


@dataclass(frozen=True)
class MemoryChange:
    """Bytes that were allocated (above 0) or freed at a moment [s], and the total that is held after it."""

    at: float
    bytes: int
    total: int
    thread: int | str
    is_on_device: bool


@dataclass(frozen=True)
class Trace:
    """What one rank's profiler has recorded; `about` is metadata of the run, empty in traces of other programs."""

    path: Path
    spans: Sequence[Span]
    about: Mapping[str, Any]
    memory: Sequence[MemoryChange]


def read_trace(path: Path) -> Trace:
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

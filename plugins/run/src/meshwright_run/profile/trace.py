"""Read a trace of torch.profiler (Chrome's JSON format), and find when a rank computes, communicates or does neither.

[Note: exposed communication] A message is in flight while an NCCL kernel runs; on a CPU, while a gloo thread is in a
collective or the main thread waits for other ranks. Communication is exposed while no other kernel (or copy) runs on
the device or, on a CPU, no operator on the main thread. Operators that issue messages or wait for them do not count as
computing. The rest of the time is host time, so computing, exposed and host time add up to the total.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from meshwright.plugin import PROFILER_PREFIX, WAIT_FOR_RANKS, ConfigError, open_regular_file

OPERATOR, ANNOTATION, KERNEL = "cpu_op", "user_annotation", "kernel"
"""Kinds of spans: Kineto's categories."""
DEVICE_KINDS = (KERNEL, "gpu_memcpy", "gpu_memset")
"""Kinds of spans on an accelerator."""
MAX_BYTES = 1 << 30
"""Maximum size of a decompressed trace. Reading it takes about ten times as much memory."""
METADATA_KEY = "meshwright"
"""Key of a trace with its run, rank and steps."""

_STEP = re.compile(rf"(?:{PROFILER_PREFIX}step |ProfilerStep#)(\d+)$")
_COMMUNICATION_PREFIXES = ("c10d::", "_c10d_functional::", "_c10d_functional_autograd::", "c10d_functional::")
"""Operators that issue communication or wait for it."""
_WRAPPER_PREFIXES = ("autograd::", "torch::autograd::", "profiler::")
"""Operators that only call others, and may wait inside."""
_COMPILED_PREFIXES = ("Torch-Compiled Region", "## Call CompiledFxGraph")
_MICRO = 1e-6
_HINT = "Give a run directory, its directory `profile`, or a file rank-*.json.gz in it."


class TraceSpan(NamedTuple):
    """An event with a duration. A tuple, since a step has thousands.

    `kind`: Kineto's category. `start`, `end`: seconds since an arbitrary time. `thread`: on an accelerator, the stream.
    `operator`: number of the operator that the span is, or that launched it; 0: unknown.
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
        """Whether the span is a message in flight: an NCCL kernel, a gloo collective, or a wait for other ranks."""
        if self.kind == KERNEL:
            return self.name.startswith("nccl")
        return self.kind == ANNOTATION and (self.name.startswith("gloo:") or self.name == WAIT_FOR_RANKS)

    @property
    def is_communication_call(self) -> bool:
        return self.kind == OPERATOR and self.name.startswith(_COMMUNICATION_PREFIXES)

    @property
    def is_compute(self) -> bool:
        if self.kind not in (OPERATOR, ANNOTATION):
            return False
        if self.name.startswith(_COMPILED_PREFIXES):
            return True
        return (
            self.kind == OPERATOR
            and "::" in self.name
            and not self.name.startswith((*_COMMUNICATION_PREFIXES, *_WRAPPER_PREFIXES))
        )

    @property
    def step(self) -> int | None:
        found = _STEP.match(self.name) if self.kind == ANNOTATION else None
        return int(found[1]) if found else None

    @property
    def phase(self) -> str | None:
        is_mark = self.kind == ANNOTATION and self.name.startswith(PROFILER_PREFIX)
        if not is_mark or self.name == WAIT_FOR_RANKS or self.step is not None:
            return None
        return self.name.removeprefix(PROFILER_PREFIX)


@dataclass(frozen=True)
class MemoryChange:
    """Bytes allocated (positive) or freed (negative) at a time [s], and the total held afterwards."""

    time: float
    bytes: int
    total_bytes: int
    thread: int | str
    is_on_device: bool


@dataclass(frozen=True)
class ProfilerTrace:
    """Events recorded by one rank's profiler. `metadata`: metadata of the run; empty in traces of other programs."""

    path: Path
    spans: Sequence[TraceSpan]
    metadata: Mapping[str, Any]
    memory: Sequence[MemoryChange]


def read_trace(path: Path) -> ProfilerTrace:
    value = read_json(path)
    events = value.get("traceEvents") if isinstance(value, dict) else None
    if not isinstance(events, list):
        raise ConfigError(f"{path} is not a trace of torch.profiler: it has no list traceEvents. {_HINT}")
    try:
        spans = [_parse_span(event) for event in events if event.get("ph") == "X" and "dur" in event]
        memory = [_parse_memory_change(event) for event in events if event.get("name") == "[memory]"]
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"{path} is not a trace of torch.profiler: an event is malformed ({type(error).__name__}: {error}). {_HINT}"
        ) from None
    if not spans:
        raise ConfigError(f"{path} has no event with a duration, so there is nothing to show. {_HINT}")
    about = value.get(METADATA_KEY)
    memory.sort(key=lambda change: change.time)
    return ProfilerTrace(path, spans, about if isinstance(about, dict) else {}, memory)


def read_json(path: Path) -> Any:
    try:
        with open_regular_file(path) as raw:
            is_compressed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            file = gzip.GzipFile(fileobj=raw) if is_compressed else raw
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}. {_HINT}") from None
    except (EOFError, zlib.error) as error:
        raise ConfigError(f"cannot decompress {path}, which seems truncated: {error}. Record it again.") from None
    if len(content) > MAX_BYTES:
        raise ConfigError(
            f"{path} holds more than {MAX_BYTES:,} bytes. Open it in Perfetto, or record fewer steps (profile.steps)."
        )
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not a trace of torch.profiler: it is not JSON ({error}). {_HINT}") from None


def _parse_span(event: Mapping[str, Any]) -> TraceSpan:
    start, details = float(event["ts"]) * _MICRO, event.get("args") or {}
    return TraceSpan(
        name=str(event["name"]),
        kind=str(event.get("cat", "")),
        start=start,
        end=start + float(event["dur"]) * _MICRO,
        thread=event.get("tid", 0),
        operator=int(details.get("External id", 0)),
        details=details,
    )


def _parse_memory_change(event: Mapping[str, Any]) -> MemoryChange:
    details = event["args"]
    return MemoryChange(
        time=float(event["ts"]) * _MICRO,
        bytes=int(details["Bytes"]),
        total_bytes=int(details["Total Allocated"]),
        thread=event.get("tid", 0),
        # Kineto numbers device types as torch does: 0 is the CPU.
        is_on_device=int(details["Device Type"]) != 0,
    )


# -- intervals of time, and what a rank does in them

Intervals: TypeAlias = "list[tuple[float, float]]"
"""Sorted (start, end) pairs that neither overlap nor touch; any unit."""


def merge_intervals(stretches: Iterable[tuple[float, float]]) -> Intervals:
    """Return the union of intervals; those that do not end after their start are empty."""
    merged: Intervals = []
    for start, end in sorted(stretches):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def total_length(intervals: Sequence[tuple[float, float]]) -> float:
    return sum(end - start for start, end in intervals)


def intersect_intervals(intervals: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]) -> Intervals:
    common: Intervals = []
    one = two = 0
    while one < len(intervals) and two < len(others):
        start, end = max(intervals[one][0], others[two][0]), min(intervals[one][1], others[two][1])
        if start < end:
            common.append((start, end))
        if intervals[one][1] < others[two][1]:
            one += 1
        else:
            two += 1
    return common


def subtract_intervals(intervals: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]) -> Intervals:
    edges = [-math.inf, *(edge for each in others for edge in each), math.inf]
    return intersect_intervals(intervals, list(pairwise(edges))[::2])


@dataclass(frozen=True)
class Activity:
    """When a rank computes, and when messages are in flight: on its accelerator, or else on the main thread."""

    computing: Intervals
    communicating: Intervals
    is_on_device: bool

    @property
    def exposed(self) -> Intervals:
        return subtract_intervals(self.communicating, self.computing)


def measure_activity(spans: Sequence[TraceSpan]) -> Activity:
    messages = _merge_spans(each for each in spans if each.is_communication)
    on_device = [each for each in spans if each.kind in DEVICE_KINDS]
    if on_device:
        return Activity(_merge_spans(each for each in on_device if not each.is_communication), messages, True)
    main = _find_main_thread(spans)
    of_main = [each for each in spans if each.thread == main]
    computing = _merge_spans(each for each in of_main if each.is_compute)
    # An operator on sharded tensors waits inside for its communication.
    return Activity(
        subtract_intervals(computing, _merge_spans(each for each in of_main if each.is_communication_call)),
        messages,
        False,
    )


def measure_exposed_communication(spans: Sequence[TraceSpan]) -> float:
    """Return the seconds in which a rank communicates and computes nothing; see [Note: exposed communication]."""
    return total_length(measure_activity(spans).exposed)


def _find_main_thread(spans: Iterable[TraceSpan]) -> int | str | None:
    """Return the thread of the steps; if none is marked, the thread with the most operators."""
    operators: Counter[int | str] = Counter()
    for each in spans:
        if each.step is not None:
            return each.thread
        if each.kind == OPERATOR:
            operators[each.thread] += 1
    return operators.most_common(1)[0][0] if operators else None


def _merge_spans(spans: Iterable[TraceSpan]) -> Intervals:
    return merge_intervals((each.start, each.end) for each in spans)

"""Summarize a trace: operators, communication, phases of the step, memory and time. This module imports no torch."""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from meshwright.plugin import PROFILER_PREFIX, WAIT_FOR_RANKS, ConfigError

from .config import find_traces
from .trace import (
    ANNOTATION,
    DEVICE_KINDS,
    OPERATOR,
    Activity,
    Intervals,
    MemoryChange,
    ProfilerTrace,
    TraceSpan,
    intersect_intervals,
    measure_activity,
    merge_intervals,
    read_json,
    read_trace,
    subtract_intervals,
    total_length,
)

FORMAT = 2
BETWEEN_PHASES = "between"
"""Name of the time in a window that is outside all phases marked by the loop."""
MAX_TIMELINE_POINTS = 2000
"""Maximum number of points in a memory timeline."""
_TORCH_DTYPE_BYTES = {
    "c10::BFloat16": 2,
    "c10::Half": 2,
    "float": 4,
    "double": 8,
    "long": 8,
    "long int": 8,
    "int": 4,
    "short": 2,
    "signed char": 1,
    "unsigned char": 1,
    "bool": 1,
}
_NCCL_DTYPE_BYTES = {
    "BFloat16": 2,
    "Half": 2,
    "Float": 4,
    "Double": 8,
    "Long": 8,
    "Int": 4,
    "Byte": 1,
    "Char": 1,
    "Bool": 1,
}
_DTYPE_BYTES = {**_TORCH_DTYPE_BYTES, **_NCCL_DTYPE_BYTES}


@dataclass(frozen=True)
class OperatorTime:
    """All calls of an operator: seconds on the host without nested operators, and seconds of its kernels."""

    name: str
    calls: int
    seconds: float
    device_seconds: float


@dataclass(frozen=True)
class CommunicationTime:
    """All collectives of a kind. `bytes` is None if the trace has no sizes; overlapping seconds count once."""

    name: str
    calls: int
    bytes: int | None
    seconds: float
    exposed_seconds: float


@dataclass(frozen=True)
class PhaseTime:
    """A phase of the steps on the host's clock. Computing, exposed and host seconds add up to `seconds`."""

    name: str
    calls: int
    seconds: float
    computing_seconds: float
    exposed_seconds: float
    host_seconds: float


@dataclass(frozen=True)
class MemoryPeak:
    """Peak memory of a window, the operator and phase that reached it, and the peak of each phase.

    On a CPU the profiler counts only memory that is allocated and freed while it runs; on an accelerator, all memory.
    """

    bytes: int
    operator: str
    phase: str
    phases: dict[str, int]


@dataclass(frozen=True)
class ProfileSummary:
    """Summary of a window of steps on one rank. Computing, exposed and host seconds add up to `seconds`.

    `host_seconds`: time without computation and without messages in flight. `metadata`: metadata of the run.
    """

    steps: list[int]
    is_on_device: bool
    seconds: float
    computing_seconds: float
    communication_seconds: float
    exposed_seconds: float
    host_seconds: float
    operators: list[OperatorTime]
    communication: list[CommunicationTime]
    phases: list[PhaseTime]
    memory: MemoryPeak | None = None
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def num_steps(self) -> int:
        """Number of steps in the window; 1 if the trace marks none."""
        return max(1, len(self.steps))


def load_summary(path: Path, *, rank: int | None = None) -> ProfileSummary:
    """Return the summary of a trace, a summary file, or a run or profile directory (trace of `rank`, or the first)."""
    if not path.exists():
        raise ConfigError(f"{path} does not exist. Give a run directory, or a trace in its directory profile.")
    if path.is_dir():
        traces = find_traces(path)
        selected = [each for each in traces if rank is None or each.name.startswith(f"rank-{rank:05}")]
        if not selected:
            ranks = sorted({int(each.name[5:10]) for each in traces})
            raise ConfigError(f"{path} has no profile of rank {rank}. It has ranks {', '.join(map(str, ranks))}.")
        return summarize_trace(read_trace(selected[0]))
    if rank is not None:
        raise ConfigError(f"--rank={rank} selects a trace in a directory, but {path} is a file. Leave it out.")
    if path.name.startswith("summary") and path.suffix == ".json":
        return summary_from_dict(read_json(path), path)
    return summarize_trace(read_trace(path))


def summarize_trace(trace: ProfilerTrace) -> ProfileSummary:
    spans, activity = trace.spans, measure_activity(trace.spans)
    steps = [each for each in spans if each.step is not None]
    marked = [each for each in spans if each.phase is not None]
    timed = [each for each in spans if each.kind == OPERATOR or each.kind in DEVICE_KINDS]
    # Evaluations and checkpoints run between steps.
    inside = [*steps, *marked] or timed or list(spans)
    window: Intervals = [(min(each.start for each in inside), max(each.end for each in inside))]
    total = _summarize_phase("", 0, window, activity)
    return ProfileSummary(
        steps=sorted({each.step for each in steps if each.step is not None}),
        is_on_device=activity.is_on_device,
        seconds=total.seconds,
        computing_seconds=total.computing_seconds,
        communication_seconds=total_length(intersect_intervals(activity.communicating, window)),
        exposed_seconds=total.exposed_seconds,
        host_seconds=total.host_seconds,
        operators=_summarize_operators(timed),
        communication=_summarize_communication(spans, activity),
        phases=_summarize_phases(marked, activity, window),
        memory=find_memory_peak(trace),
        metadata=dict(trace.metadata),
    )


def _summarize_operators(spans: Sequence[TraceSpan]) -> list[OperatorTime]:
    names: dict[int, str] = {each.operator: each.name for each in spans if each.kind == OPERATOR}
    calls: dict[str, int] = defaultdict(int)
    host: dict[str, float] = defaultdict(float)
    device: dict[str, float] = defaultdict(float)
    for each, seconds in iter_self_times(each for each in spans if each.kind == OPERATOR):
        calls[each.name] += 1
        host[each.name] += seconds
    for each in spans:
        if each.kind in DEVICE_KINDS:
            device[names.get(each.operator, each.name)] += each.end - each.start
    found = [OperatorTime(name, calls[name], host[name], device[name]) for name in {**host, **device}]
    return sorted(found, key=lambda row: (-row.device_seconds, -row.seconds, row.name))


def iter_self_times(spans: Iterable[TraceSpan]) -> Iterator[tuple[TraceSpan, float]]:
    """Yield each span with its duration minus that of the spans nested in it on its thread."""
    threads: dict[int | str, list[TraceSpan]] = defaultdict(list)
    for each in spans:
        threads[each.thread].append(each)
    for of_thread in threads.values():
        open_ones: list[tuple[TraceSpan, float]] = []
        for each in sorted(of_thread, key=lambda span: (span.start, -span.end)):
            while open_ones and open_ones[-1][0].end <= each.start:
                yield open_ones.pop()
            if open_ones:
                outer, own = open_ones[-1]
                open_ones[-1] = outer, own - (min(each.end, outer.end) - each.start)
            open_ones.append((each, each.end - each.start))
        yield from reversed(open_ones)


def _summarize_communication(spans: Sequence[TraceSpan], activity: Activity) -> list[CommunicationTime]:
    kinds: dict[str, list[TraceSpan]] = defaultdict(list)
    for each in spans:
        if each.is_communication:
            kinds[_get_collective_name(each)].append(each)
    found = []
    for name, calls in kinds.items():
        known = [size for size in map(_count_message_bytes, calls) if size is not None]
        under_way = merge_intervals((each.start, each.end) for each in calls)
        exposed = total_length(subtract_intervals(under_way, activity.computing))
        found.append(
            CommunicationTime(name, len(calls), sum(known) if known else None, total_length(under_way), exposed)
        )
    return sorted(found, key=lambda row: (-row.exposed_seconds, -row.seconds, row.name))


def _get_collective_name(span: TraceSpan) -> str:
    """Return the name of a collective: that of gloo or meshwright, or an NCCL kernel's without types and options."""
    if span.kind == ANNOTATION:
        return span.name.removeprefix(PROFILER_PREFIX)
    words = span.name.split("(")[0].split("_")
    return f"nccl:{words[1]}" if len(words) > 1 else span.name


def _count_message_bytes(span: TraceSpan) -> int | None:
    details = span.details
    if "In msg nelems" in details:
        width = _DTYPE_BYTES.get(str(details.get("dtype")))
        return None if width is None else width * int(details["In msg nelems"])
    shapes, types = details.get("Input Dims"), details.get("Input type")
    if not isinstance(shapes, list) or not isinstance(types, list):
        # Barriers send no data.
        return 0 if span.name.endswith(":barrier") or span.name == WAIT_FOR_RANKS else None
    pairs = zip(shapes, types, strict=False)
    return sum(_DTYPE_BYTES[kind] * math.prod(shape) for shape, kind in pairs if _DTYPE_BYTES.get(kind) and shape)


def _summarize_phases(marked: Sequence[TraceSpan], activity: Activity, window: Intervals) -> list[PhaseTime]:
    names = dict.fromkeys(each.phase for each in sorted(marked, key=lambda span: span.start))
    found, rest = [], window
    for name in names:
        stretches = [(each.start, each.end) for each in marked if each.phase == name]
        covered = merge_intervals(stretches)
        rest = subtract_intervals(rest, covered)
        found.append(_summarize_phase(str(name), len(stretches), covered, activity))
    if names and total_length(rest):
        found.append(_summarize_phase(BETWEEN_PHASES, len(rest), rest, activity))
    return found


def _summarize_phase(name: str, calls: int, covered: Intervals, activity: Activity) -> PhaseTime:
    seconds = total_length(covered)
    computing = total_length(intersect_intervals(activity.computing, covered))
    exposed = total_length(intersect_intervals(activity.exposed, covered))
    return PhaseTime(name, calls, seconds, computing, exposed, max(0.0, seconds - computing - exposed))


def find_memory_peak(trace: ProfilerTrace) -> MemoryPeak | None:
    changes = _select_device_changes(trace.memory)
    if not changes:
        return None
    last = max(changes, key=lambda change: change.total_bytes)
    marks = [each for each in trace.spans if each.phase is not None]
    parts: dict[str, int] = {}
    for mark in marks:
        parts[str(mark.phase)] = max(_find_peak_bytes(changes, mark), parts.get(str(mark.phase), 0))
    operator = _find_innermost(
        (each for each in trace.spans if each.kind == OPERATOR and each.thread == last.thread), last
    )
    part = _find_innermost(marks, last)
    return MemoryPeak(last.total_bytes, operator.name if operator else "", str(part.phase) if part else "", parts)


def build_memory_timeline(trace: ProfilerTrace) -> dict[str, Any]:
    """Return the memory held over time, and the operators that allocated it, as JSON values.

    Each point is the highest of an equal share of the changes: `seconds` since the first mark, and `bytes`.
    """
    changes, peak = _select_device_changes(trace.memory), find_memory_peak(trace) or MemoryPeak(0, "", "", {})
    is_on_device = any(change.is_on_device for change in trace.memory)
    marks = [each.start for each in trace.spans if each.step is not None]
    start = min(marks, default=changes[0].time if changes else 0.0)
    each_of = max(1, -(-len(changes) // MAX_TIMELINE_POINTS))
    shares = [changes[index : index + each_of] for index in range(0, len(changes), each_of)]
    points = [max(share, key=lambda change: change.total_bytes) for share in shares]
    return {
        "measures": "all memory of the allocator" if is_on_device else "memory added within the window",
        "peak_bytes": peak.bytes,
        "peak_operator": peak.operator,
        "peak_phase": peak.phase,
        "phases": peak.phases,
        "allocated_by_operator": _count_allocated_bytes(trace, changes),
        "seconds": [point.time - start for point in points],
        "bytes": [point.total_bytes for point in points],
    }


def _select_device_changes(changes: Sequence[MemoryChange]) -> list[MemoryChange]:
    """Return the changes on the accelerator, if there are any, else all: the host then allocates little."""
    return [change for change in changes if change.is_on_device] or list(changes)


def _find_peak_bytes(changes: Sequence[MemoryChange], mark: TraceSpan) -> int:
    first = bisect.bisect_right(changes, mark.start, key=lambda change: change.time)
    last = bisect.bisect_right(changes, mark.end, key=lambda change: change.time)
    return max((change.total_bytes for change in changes[max(0, first - 1) : last]), default=0)


def _find_innermost(spans: Iterable[TraceSpan], change: MemoryChange) -> TraceSpan | None:
    running = (each for each in spans if each.start <= change.time <= each.end)
    return max(running, key=lambda span: span.start, default=None)


def _count_allocated_bytes(trace: ProfilerTrace, changes: Sequence[MemoryChange]) -> dict[str, int]:
    """Return the bytes that each operator allocated, freed or not, largest first."""
    threads: dict[int | str, list[TraceSpan]] = defaultdict(list)
    for each in trace.spans:
        if each.kind == OPERATOR:
            threads[each.thread].append(each)
    taken: dict[str, int] = defaultdict(int)
    for thread, operators in threads.items():
        operators.sort(key=lambda span: (span.start, -span.end))
        open_ones: list[TraceSpan] = []
        index = 0
        for change in changes:
            if change.thread != thread or change.bytes <= 0:
                continue
            while index < len(operators) and operators[index].start <= change.time:
                while open_ones and open_ones[-1].end <= operators[index].start:
                    open_ones.pop()
                open_ones.append(operators[index])
                index += 1
            while open_ones and open_ones[-1].end < change.time:
                open_ones.pop()
            # Operators call others, such as aten::empty; the outermost that computes counts.
            taken[next((each.name for each in open_ones if each.is_compute), "none")] += change.bytes
    return dict(sorted(taken.items(), key=lambda item: -item[1]))


def summary_to_dict(summary: ProfileSummary) -> dict[str, Any]:
    return {"profile_summary": FORMAT, **asdict(summary)}


def summary_from_dict(values: Any, path: Path) -> ProfileSummary:
    version = values.get("profile_summary") if isinstance(values, dict) else None
    if version is None:
        raise ConfigError(f"{path} is not a profile summary. Give the one in the directory profile of a run.")
    if version != FORMAT:
        raise ConfigError(
            f"{path} has summary format {version!r}, but this version reads {FORMAT}. Give the trace next to it."
        )
    tables: Mapping[str, type[Any]] = {
        "operators": OperatorTime,
        "communication": CommunicationTime,
        "phases": PhaseTime,
    }
    try:
        plain = {name: value for name, value in values.items() if name != "profile_summary"}
        plain |= {name: [row_cls(**row) for row in plain[name]] for name, row_cls in tables.items()}
        if plain["memory"] is not None:
            plain["memory"] = MemoryPeak(**plain["memory"])
        return ProfileSummary(**plain)
    except (AttributeError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is not a valid profile summary ({type(error).__name__}: {error}). Give the trace next to it."
        ) from None

"""What a trace comes to: operators, communication, the parts of a step, and what the time went to; no torch here."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ..base.errors import ConfigError
from ..events.step import MARK, WAIT
from .activity import Activity, activity
from .intervals import Intervals, common, length, union, without
from .memory import MemoryPeak, memory_peak
from .spans import ANNOTATION, ON_DEVICE, OPERATOR, Span
from .trace import Trace

FORMAT = 1
BETWEEN = "between"
"""The part of the window that is in none that the loop marks."""
_BYTES = {
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
    # As NCCL's spans call them.
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


@dataclass(frozen=True)
class OperatorTime:
    """All calls of an operator in the window.

    Attributes:
        seconds: of the host, without the operators within.
        device_seconds: of the kernels that it has launched itself.
    """

    name: str
    calls: int
    seconds: float
    device_seconds: float


@dataclass(frozen=True)
class CommunicationTime:
    """All collectives of a kind.

    Attributes:
        bytes: of the tensors that were passed; None where the trace does not tell (`record_shapes: false`).
        seconds: under way, without those that overlap counted twice.
        exposed_seconds: see [Note: exposed communication] in `activity`.
    """

    name: str
    calls: int
    bytes: int | None
    seconds: float
    exposed_seconds: float


@dataclass(frozen=True)
class PartTime:
    """A part of the steps by the host's clock, and what the rank did meanwhile; the last three add up to the first."""

    name: str
    calls: int
    seconds: float
    computing_seconds: float
    exposed_seconds: float
    host_seconds: float


@dataclass(frozen=True)
class Summary:
    """A window of steps on one rank.

    Attributes:
        steps: their numbers, from 1; none in a trace that marks none.
        seconds: of the window; computing, exposed and host add up to it.
        communication_seconds: messages under way, exposed or not.
        host_seconds: in which nothing is computed and no message is under way: host gaps.
        operators: those that take most first.
        memory: None where it was not asked for.
        about: what the run has said of itself.
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
    parts: list[PartTime]
    memory: MemoryPeak | None = None
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Steps of the window; a trace that marks none counts as one."""
        return max(1, len(self.steps))


def summarized(trace: Trace) -> Summary:
    """Summarize what a rank's profiler has seen."""
    spans, did = trace.spans, activity(trace.spans)
    steps = [each for each in spans if each.step is not None]
    marked = [each for each in spans if each.part is not None]
    timed = [each for each in spans if each.kind == OPERATOR or each.kind in ON_DEVICE]
    # Evaluations and checkpoints are between steps.
    inside = [*steps, *marked] or timed or list(spans)
    window: Intervals = [(min(each.start for each in inside), max(each.end for each in inside))]
    exposed, computing = common(did.exposed, window), common(did.computing, window)
    seconds, waiting, busy = length(window), length(exposed), length(computing)
    return Summary(
        steps=sorted({each.step for each in steps if each.step is not None}),
        is_on_device=did.is_on_device,
        seconds=seconds,
        computing_seconds=busy,
        communication_seconds=length(common(did.communicating, window)),
        exposed_seconds=waiting,
        host_seconds=max(0.0, seconds - busy - waiting),
        operators=_operators(timed),
        communication=_communication(spans, did),
        parts=_parts(marked, did, window),
        memory=memory_peak(trace),
        about=dict(trace.about),
    )


def _operators(spans: Sequence[Span]) -> list[OperatorTime]:
    names: dict[int, str] = {each.operator: each.name for each in spans if each.kind == OPERATOR}
    calls: dict[str, int] = defaultdict(int)
    host: dict[str, float] = defaultdict(float)
    device: dict[str, float] = defaultdict(float)
    for each, seconds in own_seconds(each for each in spans if each.kind == OPERATOR):
        calls[each.name] += 1
        host[each.name] += seconds
    for each in spans:
        if each.kind in ON_DEVICE:
            device[names.get(each.operator, each.name)] += each.end - each.start
    found = [OperatorTime(name, calls[name], host[name], device[name]) for name in {**host, **device}]
    return sorted(found, key=lambda row: (-row.device_seconds, -row.seconds, row.name))


def own_seconds(spans: Iterable[Span]) -> Iterator[tuple[Span, float]]:
    """Each of these with its duration less that of those within it on its thread."""
    threads: dict[int | str, list[Span]] = defaultdict(list)
    for each in spans:
        threads[each.thread].append(each)
    for of_thread in threads.values():
        open_ones: list[tuple[Span, float]] = []
        for each in sorted(of_thread, key=lambda span: (span.start, -span.end)):
            while open_ones and open_ones[-1][0].end <= each.start:
                yield open_ones.pop()
            if open_ones:
                outer, own = open_ones[-1]
                open_ones[-1] = outer, own - (min(each.end, outer.end) - each.start)
            open_ones.append((each, each.end - each.start))
        yield from reversed(open_ones)


def _communication(spans: Sequence[Span], did: Activity) -> list[CommunicationTime]:
    kinds: dict[str, list[Span]] = defaultdict(list)
    for each in spans:
        if each.is_communication:
            kinds[_kind(each)].append(each)
    found = []
    for name, calls in kinds.items():
        sizes = [_passed(each) for each in calls]
        known = [size for size in sizes if size is not None]
        under_way = union((each.start, each.end) for each in calls)
        exposed = length(without(under_way, did.computing))
        found.append(CommunicationTime(name, len(calls), sum(known) if known else None, length(under_way), exposed))
    return sorted(found, key=lambda row: (-row.exposed_seconds, -row.seconds, row.name))


def _kind(span: Span) -> str:
    """What a collective is called: gloo's own name, or ours, or the part of a kernel's before its types and options."""
    if span.kind == ANNOTATION:
        return span.name.removeprefix(MARK)
    words = span.name.split("(")[0].split("_")
    return f"nccl:{words[1]}" if len(words) > 1 else span.name


def _passed(span: Span) -> int | None:
    """Bytes of the tensors that a collective was given."""
    details = span.details
    if "In msg nelems" in details:
        width = _BYTES.get(str(details.get("dtype")))
        return None if width is None else width * int(details["In msg nelems"])
    shapes, types = details.get("Input Dims"), details.get("Input type")
    if not isinstance(shapes, list) or not isinstance(types, list):
        # Barriers pass nothing.
        return 0 if span.name.endswith(":barrier") or span.name == WAIT else None
    return sum(
        _BYTES[kind] * math.prod(shape)
        for shape, kind in zip(shapes, types, strict=False)
        if _BYTES.get(kind) and shape
    )


def _parts(marked: Sequence[Span], did: Activity, window: Intervals) -> list[PartTime]:
    names = dict.fromkeys(each.part for each in sorted(marked, key=lambda span: span.start))
    found, rest = [], window
    for name in names:
        stretches = [(each.start, each.end) for each in marked if each.part == name]
        covered = union(stretches)
        rest = without(rest, covered)
        found.append(_part(str(name), len(stretches), covered, did))
    if names and length(rest):
        found.append(_part(BETWEEN, len(rest), rest, did))
    return found


def _part(name: str, calls: int, covered: Intervals, did: Activity) -> PartTime:
    seconds = length(covered)
    computing, exposed = length(common(did.computing, covered)), length(common(did.exposed, covered))
    return PartTime(name, calls, seconds, computing, exposed, max(0.0, seconds - computing - exposed))


# -- as a file


def as_values(summary: Summary) -> dict[str, Any]:
    """A summary as values of JSON."""
    return {"profile_summary": FORMAT, **asdict(summary)}


RowT = TypeVar("RowT")


def from_values(values: Any, path: Path) -> Summary:
    """The summary that a file holds.

    Raises:
        ConfigError: it is none, or of another format.
    """
    found = values.get("profile_summary") if isinstance(values, dict) else None
    if found is None:
        raise ConfigError(f"{path} is no summary of a profile. Give the one in the directory profile of a run.")
    if found != FORMAT:
        raise ConfigError(
            f"{path} is a summary of format {found!r}, and this version reads {FORMAT}. Give the trace beside it."
        )
    try:
        plain = {name: value for name, value in values.items() if name != "profile_summary"}
        rows: Mapping[str, type[Any]] = {
            "operators": OperatorTime,
            "communication": CommunicationTime,
            "parts": PartTime,
        }
        for name, row_cls in rows.items():
            plain[name] = [row_cls(**row) for row in plain[name]]
        if plain["memory"] is not None:
            plain["memory"] = MemoryPeak(**plain["memory"])
        return Summary(**plain)
    except (AttributeError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is no whole summary of a profile ({type(error).__name__}: {error}). Give the trace beside it."
        ) from None

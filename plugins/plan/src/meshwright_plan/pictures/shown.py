"""What pictures of a plan show: memory and streams of a rank or of all stages of a pipeline, traffic, and layouts.

[Note: moments] Memory is what is held when an operator ends, from when it begins on the computing stream until the next
one does. What is no kernel of that stream counts from when the kernel before it ends.
"""

from __future__ import annotations

import functools
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from typing import Any

from meshwright.plugin import Degrees, MeshwrightError

from ..allocator import COMPUTE, reserved
from ..config import Device
from ..depth import DEPTHS
from ..meter import OWNERS
from ..planned import representatives, sums_of, trace_rank
from ..time import Span, Timeline, members, passed, play, stage_ranks
from ..trace import Job, Operation, Trace

INSIDE, BETWEEN = LINKS = ("inside", "between")  # Links within a node and between nodes
SENDS = "to "  # Prefix of the names of message streams; a rank follows
PHASES = ("forward", "backward", "optimizer")


@dataclass(frozen=True)
class Memory:
    """What a rank holds over a step, at kept moments; see [Note: moments]."""

    rank: int
    seconds: tuple[float, ...]
    owners: dict[str, tuple[int, ...]]  # bytes at each moment, by owner; owners that never hold any are left out
    operators: tuple[str, ...]
    phases: tuple[str, ...]
    peak: int  # the place of the moment that holds the most; of equal ones the last, as in `Trace.peak`
    moments: int  # how many there were to keep from

    @property
    def totals(self) -> list[int]:
        return [sum(sizes) for sizes in zip(*self.owners.values(), strict=True)]


def memory(found: Trace, line: Timeline, most: int = 2000) -> Memory:
    """Return the memory of a rank at about `most` moments, with the least and the largest of each stretch."""
    last: dict[int, Operation] = {}
    for each in found.operations:
        # Marks for profilers hold nothing.
        if each.logged not in last or not each.name.startswith("profiler."):
            last[each.logged] = each
    moments = sorted(last)
    totals = list(accumulate(sum(c for _, c in found.log[begin:end]) for begin, end in pairwise([0, *moments])))
    peak = max(range(len(totals)), key=lambda place: (totals[place], place))
    places = kept(totals, most, (peak,))
    moments = [moments[place] for place in places]
    held: list[Counter[str]] = []
    for begin, logged in pairwise([0, *moments]):
        held.append(held[-1].copy() if held else Counter())
        for block, change in found.log[begin:logged]:
            held[-1][found.owners.get(block, "other")] += change
    return Memory(
        found.rank,
        tuple(_begun(line, moments)),
        {owner: tuple(each[owner] for each in held) for owner in OWNERS if any(each[owner] for each in held)},
        tuple(last[logged].name for logged in moments),
        tuple(last[logged].phase for logged in moments),
        places.index(peak),
        len(totals),
    )


def kept(values: Sequence[float], most: int, always: Iterable[int] = ()) -> list[int]:
    """Return the places of about `most` values: the least and the largest of each stretch, and both ends."""
    if len(values) <= most:
        return list(range(len(values)))
    count = max(1, most // 2)
    found = {0, len(values) - 1, *always}
    for first, behind in pairwise(len(values) * part // count for part in range(count + 1)):
        found |= {min(range(first, behind), key=values.__getitem__), max(range(first, behind), key=values.__getitem__)}
    return sorted(found)


def _begun(line: Timeline, moments: Sequence[int]) -> Iterator[float]:
    """Yield when each moment begins on the computing stream [s]."""
    spans = [span for span in line.spans if span.stream == COMPUTE]
    logged = [span.logged for span in spans]
    for moment in moments:
        place = bisect_left(logged, moment)
        if place < len(spans) and logged[place] == moment:
            yield spans[place].start
        else:
            yield spans[place - 1].end if place else 0.0


@dataclass(frozen=True)
class Bar:
    """Operators that run one after the other on a stream; `name` is that of the longest, `busy` their seconds."""

    name: str
    phase: str
    count: int
    start: float
    end: float
    busy: float


@dataclass(frozen=True)
class Lane:
    """One stream of a rank; `link` is empty where it does not communicate."""

    rank: int
    stream: str
    link: str
    bars: tuple[Bar, ...]


def lanes(
    traces: Sequence[Trace], lines: Sequence[Timeline], degrees: Degrees, device: Device, most: int = 16_000
) -> list[Lane]:
    """Return the streams of ranks in about `most` bars; short operators share a bar with their neighbours."""
    streams = [(found, line, *item) for found, line in zip(traces, lines, strict=True) for item in _streams(line)]
    # The most bars that each stream may have, so that all together have at most `most`.
    rest = sorted(len(spans) for *_, spans in streams)
    while rest and rest[0] * len(rest) <= most:
        most -= rest.pop(0)
    room = max(1, most // max(1, len(rest)))
    made = []
    for found, line, stream, spans in streams:
        sizes, joined = {each.group: each.ranks for each in found.collectives}, ""
        if stream.startswith(SENDS):
            joined = link([line.rank, int(stream.removeprefix(SENDS))], device)
        elif stream in sizes:
            joined = link(members(stream, line.rank, degrees, sizes[stream]), device)
        width = 0.0 if len(spans) <= room else 2 * line.seconds / room
        made.append(Lane(line.rank, stream, joined, tuple(_bars(spans, width))))
    return made


def _streams(line: Timeline) -> list[tuple[str, list[Span]]]:
    found: dict[str, list[Span]] = {COMPUTE: []}
    for span in line.spans:
        found.setdefault(span.stream, []).append(span)
    return sorted(found.items(), key=lambda item: item[0].startswith(SENDS))


def _bars(spans: Iterable[Span], width: float) -> Iterator[Bar]:
    """Yield bars of one phase each; those of several spans last at most `width` seconds."""
    group: list[Span] = []
    for span in sorted(spans, key=lambda each: each.start):
        if group and (span.phase != group[0].phase or span.end - group[0].start > width):
            yield _bar(group)
            group = []
        group.append(span)
    if group:
        yield _bar(group)


def _bar(group: Sequence[Span]) -> Bar:
    longest = max(group, key=lambda each: each.end - each.start)
    busy = sum(each.end - each.start for each in group)
    return Bar(longest.name, group[0].phase, len(group), group[0].start, group[-1].end, busy)


def link(ranks: Iterable[int], device: Device) -> str:
    """Return what joins these ranks: `BETWEEN` if they are on several nodes."""
    return BETWEEN if len({rank // device.node.ranks for rank in ranks}) > 1 else INSIDE


def hidden(line: Timeline, stream: str) -> float:
    """Return the seconds in which both a stream and the computing stream work."""
    computed = [(each.start, each.end) for each in line.spans if each.stream == COMPUTE]
    starts, ends = zip(*computed, strict=True) if computed else ((), ())
    found = 0.0
    for span in line.spans:
        if span.stream == stream:
            place = bisect_right(ends, span.start)
            while place < len(starts) and starts[place] < span.end:
                found += min(span.end, ends[place]) - max(span.start, starts[place])
                place += 1
    return found


WHOLE = 32  # Deeper models are drawn with fewer blocks
OF_STAGE = 4  # Blocks of each stage of a pipeline that is drawn with fewer
LINK_NAMES = {INSIDE: "inside of a node", BETWEEN: "between nodes"}


@dataclass(frozen=True)
class Shown:
    """What there is to draw of a plan."""

    plan: Mapping[str, Any]
    degrees: Degrees
    device: Device
    traces: Sequence[Trace]  # traces, lines: of one rank, or of one rank of each stage of a pipeline
    lines: Sequence[Timeline]
    drawn_layers: int  # drawn_layers, layers: blocks of the model that `traces` are of, and that is planned
    layers: int
    layouts: Sequence[Mapping[str, Any]] = ()

    @property
    def is_whole(self) -> bool:
        return self.drawn_layers == self.layers

    @property
    def title(self) -> str:
        return " on ".join(filter(None, [self.plan.get("strategy"), str(self.degrees)]))

    @property
    def depth(self) -> str:
        """Words for how much of the model is drawn; "" if it is all."""
        return "" if self.is_whole else f"a model of {self.drawn_layers} blocks, not of all {self.layers}"

    @property
    def limit(self) -> int:
        """Bytes that torch's allocator can take from the device."""
        return self.device.memory_bytes - self.device.context_bytes

    @functools.cached_property
    def memories(self) -> list[Memory]:
        most = max(300, min(2000, 8000 // len(self.traces)))
        return [memory(found, line, most) for found, line in zip(self.traces, self.lines, strict=True)]

    @functools.cached_property
    def lanes(self) -> list[Lane]:
        return lanes(self.traces, self.lines, self.degrees, self.device)

    @functools.cached_property
    def reserved(self) -> list[int]:
        """Bytes that the allocator takes for each of `traces`."""
        of_plan = {each["rank"]: each["peak_reserved_bytes"] for each in self.plan["ranks"]} if self.is_whole else {}
        library = self.device.library_bytes
        return [of_plan.get(found.rank) or reserved(found, workspace=library) for found in self.traces]


def shown(job: Job, device: Device, plan: Mapping[str, Any], layouts: Sequence[Mapping[str, Any]] = ()) -> Shown:
    """Trace what is to be drawn: the rank that reserves the most, or all stages of a pipeline (see `to_plan`)."""
    ranks, layers = _ranks(job.degrees, plan), job.layers
    fewer = OF_STAGE * job.degrees.pp if job.degrees.pp > 1 else DEPTHS[-1][-1]
    if job.with_layers is not None and job.layers > max(WHOLE, fewer):
        layers = fewer
    try:
        traces = [trace_rank(job.at_depth(layers), rank) for rank in ranks]
    except MeshwrightError:
        if layers == job.layers:
            raise
        layers = job.layers  # so few blocks cannot be divided as the run file says
        traces = [trace_rank(job, rank) for rank in ranks]
    lines = play(traces, job.degrees, device, is_compiled=job.is_compiled, chunked=job.chunked)
    layouts = [each for each in layouts if each.get("step_seconds") and each.get("peak_reserved_bytes")]
    return Shown(plan, job.degrees, device, traces, lines, layers, job.layers, layouts)


def to_plan(degrees: Degrees, asked: Sequence[int] | None) -> list[int]:
    """Return the ranks to plan for pictures: `asked` or the representatives, and one rank of each stage."""
    ranks = representatives(degrees) if asked is None else list(asked)
    return ranks if degrees.pp == 1 else sorted({*stage_ranks(ranks[0], degrees), *ranks})


def _ranks(degrees: Degrees, plan: Mapping[str, Any]) -> list[int]:
    known = [each["rank"] for each in plan["ranks"]]
    if degrees.pp == 1:
        return [max(plan["ranks"], key=lambda each: each["peak_reserved_bytes"])["rank"]]
    pipelines = [stage_ranks(rank, degrees) for rank in known]
    return next((ranks for ranks in pipelines if {*ranks} <= {*known}), pipelines[0])


# -- traffic


@dataclass(frozen=True)
class Traffic:
    """What a rank sends in a step over one group or to one rank, for all blocks of the model."""

    rank: int
    stream: str  # name of the group, or "to" and a rank
    ranks: int
    link: str
    calls: int
    inside: float  # inside, between: bytes inside of its node, and to other nodes; see `links.passed`
    between: float
    seconds: float
    hidden: float  # the part of its seconds, from 0 to 1, in which the rank computes too; of the step that is drawn


def traffic(subject: Shown) -> list[Traffic]:
    """Return the traffic of the drawn ranks that the plan, or a trace of all blocks, tells."""
    reports = {each["rank"]: each for each in subject.plan["ranks"]}
    found = []
    for trace, line in zip(subject.traces, subject.lines, strict=True):
        report = reports.get(trace.rank)
        if report is None and subject.is_whole:
            busy = {name: line.busy(name) for name in {span.stream for span in line.spans}}
            report = {"collectives": sums_of(trace.collectives), "busy_seconds": busy}
        if report is not None:
            found += _of_rank(subject, trace, line, report)
    return found


def _of_rank(subject: Shown, found: Trace, line: Timeline, report: Mapping[str, Any]) -> list[Traffic]:
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    ranks: dict[str, list[int]] = {}
    peers = _peers(found, subject.degrees)
    for row in report["collectives"]:
        if row["kind"].startswith("recv") or row["ranks"] == 1:
            continue
        parts = {row["group"]: (members(row["group"], found.rank, subject.degrees, row["ranks"]), 1.0)}
        if row["kind"] == "send":
            parts = {f"{SENDS}{peer}": ([found.rank, peer], part) for peer, part in peers.items()}
        for stream, (those, part) in parts.items():
            ranks[stream] = those
            numbers = row["calls"], *passed(row["kind"], row["bytes"], those, subject.device.node)
            sums[stream] = [total + value * part for total, value in zip(sums[stream], numbers, strict=True)]
    made = []
    for stream, (calls, inside, between) in sums.items():
        busy, seconds = line.busy(stream), report["busy_seconds"].get(stream, 0.0)
        beside = hidden(line, stream) / busy if busy else 0.0
        size, joined = len(ranks[stream]), link(ranks[stream], subject.device)
        made.append(Traffic(found.rank, stream, size, joined, round(calls), inside, between, seconds, beside))
    return made


def _peers(found: Trace, degrees: Degrees) -> dict[int, float]:
    """Return the ranks that messages are sent to, and the part of the messages that each gets."""
    counts: Counter[int] = Counter()
    for each in found.operations:
        if each.call is not None and each.peer is not None:
            call = found.collectives[each.call]
            if call.kind == "send":
                counts[members(call.group, found.rank, degrees, call.ranks)[each.peer]] += 1
    return {peer: count / counts.total() for peer, count in counts.items()}


def busiest(rows: Sequence[Traffic]) -> list[Traffic]:
    """Return the rows of the rank that sends the most, without those below a thousandth of its largest."""
    of_rank = {rank: list(each) for rank, each in groupby(rows, key=lambda row: row.rank)}
    own = max(of_rank.values(), key=lambda each: sum(row.inside + row.between for row in each))
    most = max(max(row.inside, row.between) for row in own)
    return [row for row in own if max(row.inside, row.between) * 1000 >= most] or own


def frontier(layouts: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the fitting layouts that no other fitting one beats in both time and memory, the fastest first."""
    found: list[Mapping[str, Any]] = []
    for each in sorted(layouts, key=lambda each: (each["step_seconds"], each["peak_reserved_bytes"])):
        if each["fits"] and (not found or each["peak_reserved_bytes"] < found[-1]["peak_reserved_bytes"]):
            found.append(each)
    return found

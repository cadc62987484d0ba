"""Data of the plots of a plan: memory and timelines of one rank or of all stages of a pipeline, traffic, and layouts.

[Note: moments] A moment is the memory held when an operator ends. It is drawn from the operator's start on the
computing stream to the next moment. An operator that is no kernel of that stream starts when the previous kernel ends.
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

from ..allocator import COMPUTE, compute_reserved_bytes
from ..config import DeviceSpec
from ..extrapolation import SAMPLE_DEPTHS
from ..meter import OWNERS
from ..planner import choose_representative_ranks, summarize_collectives, trace_rank
from ..timeline import (
    Timeline,
    TimelineSpan,
    compute_bytes_sent,
    find_group_ranks,
    find_pipeline_ranks,
    simulate_timelines,
)
from ..trace import Operation, StepTrace, TrainingJob

INTRA_NODE, INTER_NODE = LINKS = ("intra_node", "inter_node")  # Links within a node and between nodes
SEND_PREFIX = "to "  # Message streams are named "to RANK"
PHASES = ("forward", "backward", "optimizer")


@dataclass(frozen=True)
class MemoryCurve:
    """Memory of a rank over a step, at sampled moments; see [Note: moments]."""

    rank: int
    seconds: tuple[float, ...]
    bytes_by_owner: dict[str, tuple[int, ...]]  # bytes at each moment, by owner; owners that hold none are left out
    operators: tuple[str, ...]
    phases: tuple[str, ...]
    peak_index: int  # index of the peak; the last of equal ones, as in `StepTrace.peak`
    num_moments: int  # number of moments before sampling

    @property
    def totals(self) -> list[int]:
        return [sum(sizes) for sizes in zip(*self.bytes_by_owner.values(), strict=True)]


def sample_memory(trace: StepTrace, timeline: Timeline, max_moments: int = 2000) -> MemoryCurve:
    """Return the memory of a rank at about `max_moments` moments, which include the peak; see `downsample`."""
    last: dict[int, Operation] = {}
    for each in trace.operations:
        # Profiler markers hold no memory.
        if each.log_length not in last or not each.name.startswith("profiler."):
            last[each.log_length] = each
    moments = sorted(last)
    totals = list(accumulate(sum(c for _, c in trace.memory_log[begin:end]) for begin, end in pairwise([0, *moments])))
    peak = max(range(len(totals)), key=lambda index: (totals[index], index))
    indices = downsample(totals, max_moments, (peak,))
    moments = [moments[index] for index in indices]
    held: list[Counter[str]] = []
    for begin, logged in pairwise([0, *moments]):
        held.append(held[-1].copy() if held else Counter())
        for block, change in trace.memory_log[begin:logged]:
            held[-1][trace.owners_by_block.get(block, "other")] += change
    return MemoryCurve(
        trace.rank,
        tuple(_moment_starts(timeline, moments)),
        {owner: tuple(each[owner] for each in held) for owner in OWNERS if any(each[owner] for each in held)},
        tuple(last[logged].name for logged in moments),
        tuple(last[logged].phase for logged in moments),
        indices.index(peak),
        len(totals),
    )


def downsample(values: Sequence[float], max_points: int, always: Iterable[int] = ()) -> list[int]:
    """Return indices of about `max_points` values: minimum and maximum of each interval, both ends, and `always`."""
    if len(values) <= max_points:
        return list(range(len(values)))
    count = max(1, max_points // 2)
    found = {0, len(values) - 1, *always}
    for first, behind in pairwise(len(values) * part // count for part in range(count + 1)):
        found |= {min(range(first, behind), key=values.__getitem__), max(range(first, behind), key=values.__getitem__)}
    return sorted(found)


def _moment_starts(timeline: Timeline, moments: Sequence[int]) -> Iterator[float]:
    """Yield the start of each moment [s]; see [Note: moments]."""
    spans = [span for span in timeline.spans if span.stream == COMPUTE]
    logged = [span.log_length for span in spans]
    for moment in moments:
        index = bisect_left(logged, moment)
        if index < len(spans) and logged[index] == moment:
            yield spans[index].start
        else:
            yield spans[index - 1].end if index else 0.0


@dataclass(frozen=True)
class Bar:
    """Consecutive operators of a stream, drawn as one: `name` of the longest, and `busy`, the sum of times [s]."""

    name: str
    phase: str
    count: int
    start: float
    end: float
    busy: float


@dataclass(frozen=True)
class Lane:
    """One stream of a rank; `link` is empty for a stream that does not communicate."""

    rank: int
    stream: str
    link: str
    bars: tuple[Bar, ...]


def build_lanes(
    traces: Sequence[StepTrace], lines: Sequence[Timeline], degrees: Degrees, device: DeviceSpec, max_bars: int = 16_000
) -> list[Lane]:
    """Return the streams of ranks as about `max_bars` bars in all; short consecutive operators share a bar."""
    streams = [
        (found, line, *item) for found, line in zip(traces, lines, strict=True) for item in _group_by_stream(line)
    ]
    # Find the limit per stream that keeps the total at `max_bars`.
    rest = sorted(len(spans) for *_, spans in streams)
    while rest and rest[0] * len(rest) <= max_bars:
        max_bars -= rest.pop(0)
    room = max(1, max_bars // max(1, len(rest)))
    made = []
    for found, line, stream, spans in streams:
        sizes, joined = {each.group: each.num_ranks for each in found.collectives}, ""
        if stream.startswith(SEND_PREFIX):
            joined = find_link([line.rank, int(stream.removeprefix(SEND_PREFIX))], device)
        elif stream in sizes:
            joined = find_link(find_group_ranks(stream, line.rank, degrees, sizes[stream]), device)
        width = 0.0 if len(spans) <= room else 2 * line.seconds / room
        made.append(Lane(line.rank, stream, joined, tuple(_build_bars(spans, width))))
    return made


def _group_by_stream(timeline: Timeline) -> list[tuple[str, list[TimelineSpan]]]:
    found: dict[str, list[TimelineSpan]] = {COMPUTE: []}
    for span in timeline.spans:
        found.setdefault(span.stream, []).append(span)
    return sorted(found.items(), key=lambda item: item[0].startswith(SEND_PREFIX))


def _build_bars(spans: Iterable[TimelineSpan], width: float) -> Iterator[Bar]:
    """Yield bars, each within one phase; a bar of several spans lasts at most `width` seconds."""
    group: list[TimelineSpan] = []
    for span in sorted(spans, key=lambda each: each.start):
        if group and (span.phase != group[0].phase or span.end - group[0].start > width):
            yield _merge_spans(group)
            group = []
        group.append(span)
    if group:
        yield _merge_spans(group)


def _merge_spans(group: Sequence[TimelineSpan]) -> Bar:
    longest = max(group, key=lambda each: each.end - each.start)
    busy = sum(each.end - each.start for each in group)
    return Bar(longest.name, group[0].phase, len(group), group[0].start, group[-1].end, busy)


def find_link(ranks: Iterable[int], device: DeviceSpec) -> str:
    """Return the link between these ranks: `INTER_NODE` if they are on several nodes, else `INTRA_NODE`."""
    return INTER_NODE if len({rank // device.node.ranks for rank in ranks}) > 1 else INTRA_NODE


def compute_overlap(timeline: Timeline, stream: str) -> float:
    """Return the time [s] in which both a stream and the computing stream are busy."""
    computed = [(each.start, each.end) for each in timeline.spans if each.stream == COMPUTE]
    starts, ends = zip(*computed, strict=True) if computed else ((), ())
    found = 0.0
    for span in timeline.spans:
        if span.stream == stream:
            index = bisect_right(ends, span.start)
            while index < len(starts) and starts[index] < span.end:
                found += min(span.end, ends[index]) - max(span.start, starts[index])
                index += 1
    return found


MAX_LAYERS_DRAWN = 32  # Deeper models are traced with fewer blocks for the plots
BLOCKS_PER_STAGE_DRAWN = 4  # Blocks per pipeline stage of such a trace
LINK_NAMES = {INTRA_NODE: "within a node", INTER_NODE: "between nodes"}


@dataclass(frozen=True)
class PlotData:
    """Data of the plots of a plan."""

    plan: Mapping[str, Any]
    degrees: Degrees
    device: DeviceSpec
    traces: Sequence[StepTrace]  # `traces` and `timelines` are of one rank, or of one rank per pipeline stage
    timelines: Sequence[Timeline]
    drawn_layers: int  # blocks in `traces`; `layers`: blocks of the planned model
    layers: int
    layouts: Sequence[Mapping[str, Any]] = ()

    @property
    def has_all_layers(self) -> bool:
        return self.drawn_layers == self.layers

    @property
    def title(self) -> str:
        return " on ".join(filter(None, [self.plan.get("strategy"), str(self.degrees)]))

    @property
    def depth_note(self) -> str:
        """Number of blocks in the plots, as text; "" if all are drawn."""
        return "" if self.has_all_layers else f"{self.drawn_layers} of the {self.layers} blocks"

    @property
    def usable_bytes(self) -> int:
        """Bytes of the device that torch's caching allocator can reserve."""
        return self.device.memory_bytes - self.device.context_bytes

    @functools.cached_property
    def memory_curves(self) -> list[MemoryCurve]:
        most = max(300, min(2000, 8000 // len(self.traces)))
        return [sample_memory(found, line, most) for found, line in zip(self.traces, self.timelines, strict=True)]

    @functools.cached_property
    def lanes(self) -> list[Lane]:
        return build_lanes(self.traces, self.timelines, self.degrees, self.device)

    @functools.cached_property
    def reserved_bytes(self) -> list[int]:
        """Peak reserved bytes of each of `traces`."""
        of_plan = (
            {each["rank"]: each["peak_reserved_bytes"] for each in self.plan["ranks"]} if self.has_all_layers else {}
        )
        library = self.device.library_bytes
        return [of_plan.get(found.rank) or compute_reserved_bytes(found, workspace=library) for found in self.traces]


def collect_plot_data(
    job: TrainingJob, device: DeviceSpec, plan: Mapping[str, Any], layouts: Sequence[Mapping[str, Any]] = ()
) -> PlotData:
    """Trace the ranks to draw: the one that reserves the most, or one of each pipeline stage (see `choose_ranks`)."""
    ranks, layers = _choose_drawn_ranks(job.degrees, plan), job.num_layers
    fewer = BLOCKS_PER_STAGE_DRAWN * job.degrees.pp if job.degrees.pp > 1 else SAMPLE_DEPTHS[-1][-1]
    if job.build_with_layers is not None and job.num_layers > max(MAX_LAYERS_DRAWN, fewer):
        layers = fewer
    try:
        traces = [trace_rank(job.with_num_layers(layers), rank) for rank in ranks]
    except MeshwrightError:
        if layers == job.num_layers:
            raise
        layers = job.num_layers  # The run file's layout does not divide so few blocks
        traces = [trace_rank(job, rank) for rank in ranks]
    lines = simulate_timelines(
        traces, job.degrees, device, is_compiled=job.is_compiled, chunked_groups=job.chunked_groups
    )
    layouts = [each for each in layouts if each.get("step_seconds") and each.get("peak_reserved_bytes")]
    return PlotData(plan, job.degrees, device, traces, lines, layers, job.num_layers, layouts)


def choose_ranks(degrees: Degrees, requested: Sequence[int] | None) -> list[int]:
    """Return the ranks to plan for plots: `requested`, or representative ones; with a pipeline, also one per stage."""
    ranks = choose_representative_ranks(degrees) if requested is None else list(requested)
    return ranks if degrees.pp == 1 else sorted({*find_pipeline_ranks(ranks[0], degrees), *ranks})


def _choose_drawn_ranks(degrees: Degrees, plan: Mapping[str, Any]) -> list[int]:
    known = [each["rank"] for each in plan["ranks"]]
    if degrees.pp == 1:
        return [max(plan["ranks"], key=lambda each: each["peak_reserved_bytes"])["rank"]]
    pipelines = [find_pipeline_ranks(rank, degrees) for rank in known]
    return next((ranks for ranks in pipelines if {*ranks} <= {*known}), pipelines[0])


# -- traffic


@dataclass(frozen=True)
class StreamTraffic:
    """Bytes that a rank sends in a step over one group or to one rank, for all blocks of the model."""

    rank: int
    stream: str  # name of the group, or "to RANK"
    num_ranks: int
    link: str
    num_calls: int
    intra_node_bytes: float  # see `compute_bytes_sent`
    inter_node_bytes: float
    seconds: float
    overlap_fraction: float  # fraction of `seconds`, 0 to 1, in which the rank also computes, in the step that is drawn


def collect_traffic(plot_data: PlotData) -> list[StreamTraffic]:
    """Return the traffic of the drawn ranks, from the plan or from traces of all blocks; other ranks are left out."""
    reports = {each["rank"]: each for each in plot_data.plan["ranks"]}
    found = []
    for trace, line in zip(plot_data.traces, plot_data.timelines, strict=True):
        report = reports.get(trace.rank)
        if report is None and plot_data.has_all_layers:
            busy = {name: line.busy_seconds(name) for name in {span.stream for span in line.spans}}
            report = {"collectives": summarize_collectives(trace.collectives), "busy_seconds": busy}
        if report is not None:
            found += _sum_rank_traffic(plot_data, trace, line, report)
    return found


def _sum_rank_traffic(
    plot_data: PlotData, trace: StepTrace, timeline: Timeline, report: Mapping[str, Any]
) -> list[StreamTraffic]:
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    ranks: dict[str, list[int]] = {}
    peers = _find_peers(trace, plot_data.degrees)
    for row in report["collectives"]:
        if row["kind"].startswith("recv") or row["ranks"] == 1:
            continue
        parts = {row["group"]: (find_group_ranks(row["group"], trace.rank, plot_data.degrees, row["ranks"]), 1.0)}
        if row["kind"] == "send":
            parts = {f"{SEND_PREFIX}{peer}": ([trace.rank, peer], part) for peer, part in peers.items()}
        for stream, (group, part) in parts.items():
            ranks[stream] = group
            numbers = row["calls"], *compute_bytes_sent(row["kind"], row["bytes"], group, plot_data.device.node)
            sums[stream] = [total + value * part for total, value in zip(sums[stream], numbers, strict=True)]
    made = []
    for stream, (calls, inside, between) in sums.items():
        busy, seconds = timeline.busy_seconds(stream), report["busy_seconds"].get(stream, 0.0)
        overlap = compute_overlap(timeline, stream) / busy if busy else 0.0
        size, joined = len(ranks[stream]), find_link(ranks[stream], plot_data.device)
        made.append(StreamTraffic(trace.rank, stream, size, joined, round(calls), inside, between, seconds, overlap))
    return made


def _find_peers(trace: StepTrace, degrees: Degrees) -> dict[int, float]:
    """Return the ranks that messages are sent to, and the fraction of the messages that each receives."""
    counts: Counter[int] = Counter()
    for each in trace.operations:
        if each.collective_index is not None and each.peer is not None:
            call = trace.collectives[each.collective_index]
            if call.kind == "send":
                counts[find_group_ranks(call.group, trace.rank, degrees, call.num_ranks)[each.peer]] += 1
    return {peer: count / counts.total() for peer, count in counts.items()}


def select_busiest(rows: Sequence[StreamTraffic]) -> list[StreamTraffic]:
    """Return the rows of the rank that sends the most, without those below 1/1000 of its largest."""
    of_rank = {rank: list(each) for rank, each in groupby(rows, key=lambda row: row.rank)}
    own = max(of_rank.values(), key=lambda each: sum(row.intra_node_bytes + row.inter_node_bytes for row in each))
    most = max(max(row.intra_node_bytes, row.inter_node_bytes) for row in own)
    return [row for row in own if max(row.intra_node_bytes, row.inter_node_bytes) * 1000 >= most] or own


def find_pareto_frontier(layouts: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the fitting layouts on the Pareto frontier of step time and memory, fastest first."""
    found: list[Mapping[str, Any]] = []
    for each in sorted(layouts, key=lambda each: (each["step_seconds"], each["peak_reserved_bytes"])):
        if each["fits"] and (not found or each["peak_reserved_bytes"] < found[-1]["peak_reserved_bytes"]):
            found.append(each)
    return found

"""What pictures of a plan show: the step of a rank or of all stages of a pipeline, their traffic, and layouts."""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from meshwright.plugin import Degrees, MeshwrightError

from ..allocator import reserved
from ..depth import DEPTHS
from ..device import Device
from ..links import members, passed
from ..planned import representatives, sums_of, trace_rank
from ..time import Timeline, play, stage_ranks
from ..trace import Job, Trace
from .series import BETWEEN, INSIDE, SENDS, Lane, Memory, hidden, lanes, link, memory

WHOLE = 32
"""Deeper models are drawn with fewer blocks."""
OF_STAGE = 4
"""Blocks of each stage of a pipeline that is drawn with fewer."""
LINK_NAMES = {INSIDE: "inside of a node", BETWEEN: "between nodes"}


@dataclass(frozen=True)
class Shown:
    """What there is to draw of a plan.

    Attributes:
        traces, lines: of one rank, or of one rank of each stage of a pipeline.
        drawn_layers, layers: blocks of the model that `traces` are of, and that is planned.
        layouts: of a search, each with `label`, `step_seconds`, `peak_reserved_bytes` and `fits`.
    """

    plan: Mapping[str, Any]
    degrees: Degrees
    device: Device
    traces: Sequence[Trace]
    lines: Sequence[Timeline]
    drawn_layers: int
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
    """Trace what is to be drawn: the rank that reserves the most, or all stages of a pipeline.

    Args:
        plan: of the same job and device; see `to_plan` for the ranks that it needs if the model is deep.
        layouts: those without seconds or bytes are left out.

    Raises:
        MeshwrightError: as training does.
    """
    ranks, layers = _ranks(job.degrees, plan), _layers(job)
    try:
        traces = [trace_rank(job.at_depth(layers), rank) for rank in ranks]
    except MeshwrightError:
        if layers == job.layers:
            raise
        # So few blocks cannot be divided as the run file says.
        layers = job.layers
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


def _layers(job: Job) -> int:
    fewer = OF_STAGE * job.degrees.pp if job.degrees.pp > 1 else DEPTHS[-1][-1]
    return fewer if job.with_layers is not None and job.layers > max(WHOLE, fewer) else job.layers


# -- traffic


@dataclass(frozen=True)
class Traffic:
    """What a rank sends in a step over one group or to one rank, for all blocks of the model.

    Attributes:
        stream: name of the group, or "to" and a rank.
        inside, between: bytes inside of its node, and to other nodes; see `links.passed`.
        hidden: the part of its seconds, from 0 to 1, in which the rank computes too; of the step that is drawn.
    """

    rank: int
    stream: str
    ranks: int
    link: str
    calls: int
    inside: float
    between: float
    seconds: float
    hidden: float


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
        group = members(row["group"], found.rank, subject.degrees, row["ranks"])
        parts = {row["group"]: (group, 1.0)}
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

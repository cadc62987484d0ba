"""What pictures of a plan show: the step of a rank, or of all stages of a pipeline, and what they send over which link.

`shown` makes it of a job and its plan; `write_page` and `write_pngs` draw it.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...base.errors import MeshwrightError
from ...mesh.sizes import Degrees
from ..allocator import reserved
from ..depth import DEPTHS
from ..device import Device
from ..links import members, passed
from ..planned import trace_rank
from ..ranks import representatives
from ..time import Timeline, play, stage_ranks
from ..trace import Job, Trace
from .series import BETWEEN, INSIDE, SENDS, Lane, Memory, hidden, lanes, link, memory

WHOLE = 32
"""Blocks of a model that is drawn as it is; of a deeper one fewer are."""
OF_STAGE = 4
"""Blocks of each stage of a pipeline, of a model that is deeper than `WHOLE`."""


@dataclass(frozen=True)
class Shown:
    """What there is to draw.

    Attributes:
        plan: what `planned.plan` gives.
        traces, lines: of one rank, or of one rank of each stage of a pipeline.
        drawn_layers: blocks of the model whose step `traces` are.
        layers: of the model that is planned.
        layouts: what a search has found, each with `label`, `step_seconds`, `peak_reserved_bytes` and `fits`.
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
        return f"{self.plan['strategy']} on {self.plan['mesh']}"

    @property
    def depth(self) -> str:
        """How much of the model is drawn, in words; "" where it is all."""
        if self.is_whole:
            return ""
        return f"a model of {self.drawn_layers} blocks, not of all {self.layers}"

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
        """What the allocator takes for each of `traces`, in bytes."""
        of_plan = {each["rank"]: each["peak_reserved_bytes"] for each in self.plan["ranks"]} if self.is_whole else {}
        library = self.device.library_bytes
        return [of_plan.get(found.rank) or reserved(found, workspace=library) for found in self.traces]


def shown(job: Job, device: Device, plan: Mapping[str, Any], layouts: Sequence[Mapping[str, Any]] = ()) -> Shown:
    """Trace once more what is to be drawn: the rank that reserves the most, and of a pipeline all stages.

    Args:
        plan: of the same job and device. Of a model too deep to be drawn whole, what ranks send is told of those that
            it has alone; see `to_plan`.
        layouts: see `Shown`; those without seconds or bytes, since they were not planned, are left out.

    Raises:
        MeshwrightError: as training does.
    """
    ranks = _ranks(job.degrees, plan)
    layers = _layers(job)
    try:
        traces = [trace_rank(_with(job, layers), rank) for rank in ranks]
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
    """The ranks whose plans are drawn: those that are asked for, and of a pipeline one of each stage.

    Args:
        asked: None: those that stand for all.
    """
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


def _with(job: Job, layers: int) -> Job:
    make = job.with_layers
    return job if make is None or layers == job.layers else replace(job, model=lambda: make(layers))


# -- traffic


@dataclass(frozen=True)
class Traffic:
    """What a rank sends in a step over one group, or to one other rank; of all blocks of the model.

    Attributes:
        stream: the name of the group, or "to" and a rank.
        ranks: that communicate.
        inside, between: bytes over links inside of the node, and to other nodes; see `links.passed`.
        seconds: in which it is under way.
        hidden: the part of these, from 0 to 1, in which the rank computes beside; in the step that is drawn.
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
    """Of the ranks that are drawn, as far as the plan or a trace of all blocks tells them."""
    reports = {each["rank"]: each for each in subject.plan["ranks"]}
    found = []
    for trace, line in zip(subject.traces, subject.lines, strict=True):
        if trace.rank in reports:
            found += _of_rank(subject, trace, line, reports[trace.rank])
        elif subject.is_whole:
            found += _of_rank(subject, trace, line, _report(trace, line))
    return found


def _report(found: Trace, line: Timeline) -> dict[str, Any]:
    """What is read of a plan, of a trace."""
    calls = [
        {"kind": each.kind, "group": each.group, "ranks": each.ranks, "calls": 1, "bytes": each.bytes}
        for each in found.collectives
    ]
    return {
        "collectives": calls,
        "busy_seconds": {name: line.busy(name) for name in {span.stream for span in line.spans}},
    }


def _of_rank(subject: Shown, found: Trace, line: Timeline, report: Mapping[str, Any]) -> list[Traffic]:
    streams: dict[str, list[float]] = {}
    ranks: dict[str, list[int]] = {}
    peers = _peers(found, subject.degrees)
    for row in report["collectives"]:
        group = members(row["group"], found.rank, subject.degrees, row["ranks"])
        pairs = {f"{SENDS}{peer}": ([found.rank, peer], part) for peer, part in peers.items()}
        if row["kind"].startswith("recv") or row["ranks"] == 1:
            continue
        for stream, (those, part) in pairs.items() if row["kind"] == "send" else [(row["group"], (group, 1.0))]:
            ranks[stream] = those
            inside, between = passed(row["kind"], row["bytes"], those, subject.device.node)
            sums = streams.setdefault(stream, [0.0, 0.0, 0.0])
            for place, value in enumerate((row["calls"], inside, between)):
                sums[place] += value * part
    made = []
    for stream, (calls, inside, between) in streams.items():
        busy, seconds = line.busy(stream), report["busy_seconds"].get(stream, 0.0)
        beside = hidden(line, stream) / busy if busy else 0.0
        joined = link(ranks[stream], subject.device)
        size = len(ranks[stream])
        made.append(Traffic(found.rank, stream, size, joined, round(calls), inside, between, seconds, beside))
    return made


def _peers(found: Trace, degrees: Degrees) -> dict[int, float]:
    """To whom messages are sent, and which part of them."""
    counts: Counter[int] = Counter()
    for each in found.operations:
        if each.call is not None and each.peer is not None:
            call = found.collectives[each.call]
            if call.kind == "send":
                counts[members(call.group, found.rank, degrees, call.ranks)[each.peer]] += 1
    return {peer: count / counts.total() for peer, count in counts.items()}


# -- layouts


def frontier(layouts: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Layouts that fit, of which none other that fits is both as fast and as small; the fastest first."""
    found: list[Mapping[str, Any]] = []
    for each in sorted(layouts, key=lambda each: (each["step_seconds"], each["peak_reserved_bytes"])):
        if each["fits"] and (not found or each["peak_reserved_bytes"] < found[-1]["peak_reserved_bytes"]):
            found.append(each)
    return found


LINK_NAMES = {INSIDE: "inside of a node", BETWEEN: "between nodes"}

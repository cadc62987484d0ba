"""A plan: what some ranks of a job hold, send and take on a device, as values of JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

from meshwright.plugin import Collective, Degrees, Mesh, MeshwrightError, StrategyError, with_values

from .allocator import reserved
from .depth import Numbers, Point, at_full_size
from .device import Device
from .meter import LIBRARIES
from .stages import InStages, Tracer, from_small
from .time import Timeline, play, stage_ranks
from .trace import Job, Trace, traces
from .world import planned_world

LARGEST = ("peak_allocated_bytes", "peak_reserved_bytes", "held_bytes")


def plan(job: Job, device: Device, ranks: Sequence[int] | None = None) -> dict[str, Any]:
    """Trace some ranks of a job, and play their step on a device.

    Args:
        ranks: None: those that stand for all. The other stages of a pipeline are traced, too.

    Returns:
        Plain values; bytes and seconds, each the largest over the traced ranks.

    Raises:
        MeshwrightError: as training does.
    """
    asked = representatives(job.degrees) if ranks is None else list(ranks)
    reports = _stages(job, device, asked) if job.degrees.pp > 1 else [_report(job, device, rank) for rank in asked]
    busiest = max(reports, key=lambda each: sum(row["bytes"] for row in each["collectives"]))
    seconds = max(each["step_seconds"] for each in reports)
    largest = {key: max(each[key] for each in reports) for key in LARGEST}
    tokens = job.microbatches * job.rows * job.length * job.degrees.dp
    return {
        "strategy": str(job.stack),
        "world_size": job.degrees.world_size,
        "mesh": str(job.degrees),
        "device": device.name,
        "memory_bytes": device.memory_bytes,
        "fits": fits(largest["peak_reserved_bytes"], device),
        **largest,
        "step_seconds": seconds,
        "tokens_per_second_per_device": tokens / seconds / job.degrees.world_size,
        "collectives": busiest["collectives"],
        "ranks": reports,
    }


def fits(reserved_bytes: int, device: Device) -> bool:
    """Return whether a device has so much besides what torch's allocator does not know of."""
    return reserved_bytes <= device.memory_bytes - device.context_bytes


def representatives(degrees: Degrees) -> list[int]:
    """Return ranks, ascending, such that each other one is like one of them.

    Stages differ in what they hold, so the first two, the middle one and the last two are taken. Along the other axes
    ranks have equal parts, or the first has the most and the last the least.
    """
    of_stage = degrees.world_size // degrees.pp
    stages = {stage for stage in (0, 1, degrees.pp // 2, degrees.pp - 2, degrees.pp - 1) if 0 <= stage < degrees.pp}
    return sorted({*(stage * of_stage for stage in stages), degrees.world_size - 1})


def trace_rank(job: Job, rank: int) -> Trace:
    """Trace the step of one rank of a job, which need not exist.

    Raises:
        MeshwrightError: as training does; or the code reads values that a plan does not have.
    """
    return trace_steps(job, rank, [job.microbatches])[0]


def trace_steps(job: Job, rank: int, counts: Sequence[int]) -> list[Trace]:
    """Trace a step with each number of microbatches, ascending; see `trace_rank`."""
    with tracing(job, rank) as mesh:
        return traces(job, mesh, counts)


@contextmanager
def tracing(job: Job, rank: int) -> Iterator[Mesh]:
    """Give a mesh on which a job is traced.

    Raises:
        StrategyError: for any error raised within that is no error of meshwright.
    """
    # A mesh of its own: what is made once for a mesh belongs to the first job on it.
    with planned_mesh(job, rank) as mesh:
        try:
            yield mesh
        except MeshwrightError:
            raise
        except Exception as error:
            # Whatever a package's own code does with tensors that have no values, or with ranks that are all alike.
            reason = (str(error).strip().splitlines() or [""])[0]
            raise StrategyError(
                f"{job.stack} on {job.degrees} cannot be planned: it looks at what is known on real ranks alone "
                f"({type(error).__name__}: {reason}). Use another strategy, or train a step on real ranks."
            ) from error


@contextmanager
def planned_mesh(job: Job, rank: int) -> Iterator[Mesh]:
    """Give the mesh of a job on a rank of a planned world."""
    with planned_world(rank, job.degrees.world_size, imbalance=job.expert_imbalance) as world:
        with with_values():
            mesh = Mesh(job.degrees, world)
        yield mesh


def _report(job: Job, device: Device, rank: int) -> dict[str, Any]:
    """Report one rank; from fewer blocks and microbatches where these determine it."""
    known: dict[Point, dict[str, Any]] = {}

    def found(points: Sequence[Point]) -> Mapping[Point, dict[str, Any]]:
        missing: dict[Numbers, list[int]] = {}
        for blocks, (count,) in sorted(set(points) - known.keys()):
            missing.setdefault(blocks, []).append(count)
        for blocks, counts in missing.items():
            small = job.at_depth(*blocks) if blocks else job
            for count, each in zip(counts, trace_steps(small, rank, counts), strict=True):
                known[blocks, (count,)] = _alone(each, small, device)
        return known

    layers = job.layers if job.with_layers is not None and job.layers else None
    return at_full_size(found, layers, job.microbatches) or _alone(trace_rank(job, rank), job, device)


def _alone(found: Trace, job: Job, device: Device) -> dict[str, Any]:
    return _of_rank(found, _played([found], job, device)[0], device)


def _stages(job: Job, device: Device, asked: Sequence[int]) -> list[dict[str, Any]]:
    """Report ranks of a pipeline; from small pipelines where these determine them."""
    stages = _in_stages(job)
    if stages is not None:
        tracer = Tracer(device, trace_steps, lambda found, line: _of_rank(found, line, device))
        reports = from_small(job, stages, asked, tracer)
        if reports is not None:
            return reports
    # All stages are played together; ranks of one stage take the same time.
    together = stage_ranks(asked[0], job.degrees)
    traces = {rank: trace_rank(job, rank) for rank in sorted({*together, *asked})}
    lines = {line.rank: line for line in _played([traces[rank] for rank in together], job, device)}
    of_stage = job.degrees.world_size // job.degrees.pp
    return [
        _of_rank(found, lines[rank if rank in lines else together[rank // of_stage]], device)
        for rank, found in traces.items()
    ]


def _in_stages(job: Job) -> InStages | None:
    """Return what the strategy tells of its stages, if they can have fewer blocks."""
    if job.with_layers is None or not job.layers:
        return None
    with planned_mesh(job, 0) as mesh, with_values():
        ask = getattr(job.stack.build(mesh), "in_stages", None)
        found: InStages | None = None if ask is None else ask(job.model())
    return found if found is not None and sum(found.blocks) == job.layers else None


def _played(traces: Sequence[Trace], job: Job, device: Device) -> list[Timeline]:
    return play(traces, job.degrees, device, is_compiled=job.is_compiled, chunked=job.chunked)


def reserved_of(found: Trace, device: Device) -> int:
    """Return the bytes that are taken from a device for a step; a host returns what is freed."""
    return found.peak.bytes if device.is_host else reserved(found, workspace=device.library_bytes)


def _of_rank(found: Trace, line: Timeline, device: Device) -> dict[str, Any]:
    library = device.library_bytes
    libraries = {LIBRARIES: library} if library else {}
    by_dtype: dict[str, int] = {}
    phases: dict[str, list[Collective]] = {}
    for each in found.operations:
        if each.flops:
            name = str(each.dtype).removeprefix("torch.")
            by_dtype[name] = by_dtype.get(name, 0) + each.flops
        if each.call is not None:
            phases.setdefault(each.phase, []).append(found.collectives[each.call])
    return {
        "rank": found.rank,
        "peak_allocated_bytes": found.peak.bytes + library,
        "peak_reserved_bytes": reserved_of(found, device),
        "held_bytes": found.after.bytes + library,
        "peak_operator": found.peak.operator,
        "library_bytes": library,
        "peak_by_phase": {phase: most + library for phase, most in found.peak.phases.items()},
        "peak_by_owner": {**found.peak.owners, **libraries},
        "held_by_owner": {**found.after.owners, **libraries},
        "activations_by_module": dict(found.peak.activations),
        "flops": sum(by_dtype.values()),
        "flops_by_dtype": by_dtype,
        "step_seconds": line.seconds,
        "busy_seconds": {name: line.busy(name) for name in dict.fromkeys(span.stream for span in line.spans)},
        "gradients_bytes": most_of(found, "gradients"),
        "collectives": sums_of(found.collectives),
        "collectives_by_phase": [{"phase": phase, **row} for phase, calls in phases.items() for row in sums_of(calls)],
    }


def most_of(found: Trace, owner: str) -> int:
    """Return the most bytes that an owner has in a step; see [Note: owners] in `meter`."""
    return max(accumulate((change for block, change in found.log if found.owners.get(block) == owner), initial=0))


def sums_of(collectives: Iterable[Collective]) -> list[dict[str, Any]]:
    """Return calls and bytes of each kind of collective over each group, in the order of their first calls."""
    rows: dict[tuple[str, str, int, str], dict[str, Any]] = {}
    for each in collectives:
        dtype = str(each.dtype).removeprefix("torch.")
        named = {"kind": each.kind, "group": each.group, "ranks": each.ranks, "dtype": dtype}
        row = rows.setdefault((each.kind, each.group, each.ranks, dtype), {**named, "calls": 0, "bytes": 0})
        row["calls"] += 1
        row["bytes"] += each.bytes
    return list(rows.values())

"""A plan: what some ranks have been traced to hold and send, as values of JSON and as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.table import Table

from ..base.errors import MeshwrightError, StrategyError
from .depth import at_full_depth
from .meter import OWNERS
from .ranks import representatives
from .trace import Job, Trace, trace
from .world import planned_world


def plan(job: Job, ranks: Sequence[int] | None = None) -> dict[str, Any]:
    """Trace some ranks of a job.

    Args:
        ranks: None: those that stand for all.

    Returns:
        Plain values; bytes, each the largest over the ranks that were traced.

    Raises:
        MeshwrightError: as training does.
    """
    traced = representatives(job.degrees) if ranks is None else ranks
    reports = [_report(job, rank) for rank in traced]
    largest = {key: max(each[key] for each in reports) for key in ("peak_allocated_bytes", "held_bytes")}
    busiest = max(reports, key=lambda each: sum(row["bytes"] for row in each["collectives"]))
    return {
        "strategy": str(job.stack),
        "world_size": job.degrees.world_size,
        "mesh": str(job.degrees),
        **largest,
        "collectives": busiest["collectives"],
        "ranks": reports,
    }


def trace_rank(job: Job, rank: int) -> Trace:
    """The step of one rank of a job, which need not exist.

    Raises:
        MeshwrightError: as training does; or what runs looks at values that a plan does not have.
    """
    with planned_world(rank, job.degrees.world_size, imbalance=job.expert_imbalance) as world:
        try:
            return trace(job, world)
        except MeshwrightError:
            raise
        except Exception as error:
            # Whatever a package's own code does with tensors that have no values, or with ranks that are all alike.
            reason = (str(error).strip().splitlines() or [""])[0]
            raise StrategyError(
                f"{job.stack} on {job.degrees} cannot be planned: it looks at what is known on real ranks alone "
                f"({type(error).__name__}: {reason}). Use another strategy, or train a step on real ranks."
            ) from error


def _report(job: Job, rank: int) -> dict[str, Any]:
    """Of one rank; from models of fewer blocks where that is enough. Stages of a pipeline have few."""
    make = job.with_layers
    if make is not None and job.degrees.pp == 1:

        def found(layers: int) -> dict[str, Any]:
            return _of_rank(trace_rank(replace(job, model=lambda: make(layers)), rank))

        report = at_full_depth(found, job.layers)
        if report is not None:
            return {**report, "rank": rank}
    return _of_rank(trace_rank(job, rank))


def _of_rank(found: Trace) -> dict[str, Any]:
    return {
        "rank": found.rank,
        "peak_allocated_bytes": found.peak.bytes,
        "held_bytes": found.after.bytes,
        "peak_operator": found.peak.operator,
        "peak_by_owner": dict(found.peak.owners),
        "held_by_owner": dict(found.after.owners),
        "flops": sum(each.flops for each in found.operations),
        "collectives": _sums(found),
    }


def _sums(found: Trace) -> list[dict[str, Any]]:
    """Calls and bytes of each kind of collective over each group, in the order in which they first come."""
    rows: dict[tuple[str, str, int, str], dict[str, Any]] = {}
    for each in found.collectives:
        dtype = str(each.dtype).removeprefix("torch.")
        named = {"kind": each.kind, "group": each.group, "ranks": each.ranks, "dtype": dtype}
        row = rows.setdefault((each.kind, each.group, each.ranks, dtype), {**named, "calls": 0, "bytes": 0})
        row["calls"] += 1
        row["bytes"] += each.bytes
    return list(rows.values())


def tables(plan: Mapping[str, Any]) -> list[Table]:
    """Memory by owner and collectives of each rank that was traced, from `plan`."""
    memory = Table(title=f"{plan['strategy']} on {plan['mesh']}: memory of a rank at its peak [MiB]")
    for name in ("rank", *OWNERS, "peak", "between steps", "operator at the peak"):
        memory.add_column(name, justify="left" if name.startswith("operator") else "right")
    traffic = Table(title="collectives of a step")
    for name in ("rank", "kind", "group", "ranks", "dtype", "calls", "MiB"):
        traffic.add_column(name, justify="left" if name in ("kind", "group", "dtype") else "right")
    for each in plan["ranks"]:
        owners = [_mib(each["peak_by_owner"].get(owner, 0)) for owner in OWNERS]
        sizes = [_mib(each["peak_allocated_bytes"]), _mib(each["held_bytes"])]
        memory.add_row(str(each["rank"]), *owners, *sizes, each["peak_operator"])
        for row in each["collectives"]:
            cells = [row["kind"], row["group"], str(row["ranks"]), row["dtype"], str(row["calls"])]
            traffic.add_row(str(each["rank"]), *cells, _mib(row["bytes"]))
    return [memory, traffic]


def _mib(size: int) -> str:
    return f"{size / 2**20:,.2f}"

"""A plan: what some ranks have been traced to hold and send, as values of JSON and as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from .meter import OWNERS
from .ranks import representatives
from .trace import Job, Trace, trace
from .world import planned_world


@dataclass(frozen=True)
class Plan:
    """What is known of a job.

    Attributes:
        traces: of ranks that stand for all; see `ranks`.
    """

    job: Job
    traces: Sequence[Trace]

    def as_json(self) -> dict[str, Any]:
        """Plain values; bytes, each the largest over the ranks that were traced."""
        ranks = [_of_rank(each) for each in self.traces]
        largest = {key: max(each[key] for each in ranks) for key in ("peak_allocated_bytes", "held_bytes")}
        return {
            "strategy": str(self.job.stack),
            "world_size": self.job.degrees.world_size,
            "mesh": str(self.job.degrees),
            **largest,
            "collectives": max((each["collectives"] for each in ranks), key=lambda rows: sum(r["bytes"] for r in rows)),
            "ranks": ranks,
        }


def plan(job: Job, ranks: Sequence[int] | None = None) -> Plan:
    """Trace some ranks of a job.

    Args:
        ranks: None: those that stand for all.

    Raises:
        MeshwrightError: as training does.
    """
    traces = []
    for rank in representatives(job.degrees) if ranks is None else ranks:
        with planned_world(rank, job.degrees.world_size) as world:
            traces.append(trace(job, world))
    return Plan(job, traces)


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
    """Memory by owner and collectives of each rank that was traced, from `Plan.as_json`."""
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

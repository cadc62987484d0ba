"""A plan as tables for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from .meter import LIBRARIES, OWNERS

ALIGNED_LEFT = ("operator at the peak", "kind", "group", "dtype", "module", "fits")


def tables(plan: Mapping[str, Any]) -> list[Table]:
    """Memory by owner, time and collectives of each rank that was traced, from `plan`."""
    return [_memory(plan), _activations(plan), _time(plan), _traffic(plan)]


def _memory(plan: Mapping[str, Any]) -> Table:
    title = f"{plan['strategy']} on {plan['mesh']}: memory of a rank at its peak [MiB]"
    shown = (*OWNERS, LIBRARIES)
    columns = ("rank", *shown, "peak", "reserved", "between steps", "operator at the peak")
    table = _table(title, columns)
    for each in plan["ranks"]:
        owners = [_mib(each["peak_by_owner"].get(owner, 0)) for owner in shown]
        sizes = [_mib(each[key]) for key in ("peak_allocated_bytes", "peak_reserved_bytes", "held_bytes")]
        table.add_row(str(each["rank"]), *owners, *sizes, each["peak_operator"])
    fits = "fits" if plan["fits"] else "DOES NOT FIT"
    table.caption = f"{fits} into the {plan['memory_bytes'] / 2**30:,.1f} GiB of {plan['device']}"
    return table


def _activations(plan: Mapping[str, Any]) -> Table:
    table = _table("activations at the peak, by the module that made them [MiB]", ("rank", "module", "MiB"))
    for each in plan["ranks"]:
        for module, size in sorted(each["activations_by_module"].items(), key=lambda item: -item[1]):
            table.add_row(str(each["rank"]), module, _mib(size))
    return table


def _time(plan: Mapping[str, Any]) -> Table:
    tokens = plan["tokens_per_second_per_device"]
    title = (
        f"a step on {plan['device']}: {plan['step_seconds']:.4g} s, {tokens:,.0f} tokens a second and device; "
        f"seconds in which streams are busy"
    )
    streams = list(dict.fromkeys(name for each in plan["ranks"] for name in each["busy_seconds"]))
    table = _table(title, ("rank", *streams, "not computing", "step"))
    for each in plan["ranks"]:
        busy = [f"{each['busy_seconds'].get(name, 0.0):.4g}" for name in streams]
        idle = each["step_seconds"] - each["busy_seconds"].get("compute", 0.0)
        table.add_row(str(each["rank"]), *busy, f"{idle:.4g}", f"{each['step_seconds']:.4g}")
    return table


def _traffic(plan: Mapping[str, Any]) -> Table:
    table = _table("collectives of a step", ("rank", "kind", "group", "ranks", "dtype", "calls", "MiB"))
    for each in plan["ranks"]:
        for row in each["collectives"]:
            cells = [row["kind"], row["group"], str(row["ranks"]), row["dtype"], str(row["calls"])]
            table.add_row(str(each["rank"]), *cells, _mib(row["bytes"]))
    return table


def _table(title: str, columns: tuple[str, ...]) -> Table:
    table = Table(title=title)
    for name in columns:
        table.add_column(name, justify="left" if name in ALIGNED_LEFT else "right")
    return table


def _mib(size: int) -> str:
    return f"{size / 2**20:,.2f}"

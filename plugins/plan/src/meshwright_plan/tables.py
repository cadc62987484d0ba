"""Tables of a plan for a terminal, and formatting of sizes and times with units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from .meter import LIBRARIES, OWNERS

ALIGNED_LEFT = ("operator at the peak", "kind", "group", "dtype", "module", "fits")


def format_size(size: float) -> str:
    for unit, one in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= one:
            return f"{size / one:,.2f} {unit}" if size < 100 * one else f"{size / one:,.0f} {unit}"
    return f"{size:,.0f} B"


def format_seconds(seconds: float) -> str:
    for unit, one in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= one:
            return f"{seconds / one:,.3g} {unit}" if seconds < 100 * one else f"{seconds / one:,.0f} {unit}"
    return f"{seconds / 1e-6:,.3g} µs"


def build_tables(plan: Mapping[str, Any]) -> list[Table]:
    """Return tables of memory by owner, activations, time and collectives, with rows for each traced rank."""
    return [_memory_table(plan), _activation_table(plan), _time_table(plan), _collective_table(plan)]


def new_table(title: str, columns: Sequence[str], left: Sequence[str] = ALIGNED_LEFT) -> Table:
    made = Table(title=title)
    for name in columns:
        made.add_column(name, justify="left" if name in left else "right")
    return made


def _memory_table(plan: Mapping[str, Any]) -> Table:
    title = f"{plan['strategy']} on {plan['mesh']}: peak memory per rank [MiB]"
    shown = (*OWNERS, LIBRARIES)
    made = new_table(title, ("rank", *shown, "peak", "reserved", "between steps", "operator at the peak"))
    for each in plan["ranks"]:
        owners = [_format_mib(each["peak_by_owner"].get(owner, 0)) for owner in shown]
        sizes = [_format_mib(each[key]) for key in ("peak_allocated_bytes", "peak_reserved_bytes", "persistent_bytes")]
        made.add_row(str(each["rank"]), *owners, *sizes, each["peak_operator"])
    fits = "fits" if plan["fits"] else "DOES NOT FIT"
    made.caption = f"{fits} into the {plan['memory_bytes'] / 2**30:,.1f} GiB of {plan['device']}"
    return made


def _activation_table(plan: Mapping[str, Any]) -> Table:
    made = new_table("activations at the peak by module [MiB]", ("rank", "module", "MiB"))
    for each in plan["ranks"]:
        for module, size in sorted(each["activations_by_module"].items(), key=lambda item: -item[1]):
            made.add_row(str(each["rank"]), module, _format_mib(size))
    return made


def _time_table(plan: Mapping[str, Any]) -> Table:
    tokens = plan["tokens_per_second_per_device"]
    title = (
        f"step time on {plan['device']}: {plan['step_seconds']:.4g} s, {tokens:,.0f} tokens per second and device; "
        f"busy time of each stream [s]"
    )
    streams = list(dict.fromkeys(name for each in plan["ranks"] for name in each["busy_seconds"]))
    made = new_table(title, ("rank", *streams, "not computing", "step"))
    for each in plan["ranks"]:
        busy = [f"{each['busy_seconds'].get(name, 0.0):.4g}" for name in streams]
        idle = each["step_seconds"] - each["busy_seconds"].get("compute", 0.0)
        made.add_row(str(each["rank"]), *busy, f"{idle:.4g}", f"{each['step_seconds']:.4g}")
    return made


def _collective_table(plan: Mapping[str, Any]) -> Table:
    made = new_table("collectives per step", ("rank", "kind", "group", "ranks", "dtype", "calls", "MiB"))
    for each in plan["ranks"]:
        for row in each["collectives"]:
            cells = [row["kind"], row["group"], str(row["ranks"]), row["dtype"], str(row["calls"])]
            made.add_row(str(each["rank"]), *cells, _format_mib(row["bytes"]))
    return made


def _format_mib(size: int) -> str:
    return f"{size / 2**20:,.2f}"

"""Summary and tables of a plan for a terminal, and formatting of sizes and times with units.

The summary fits 60 columns and the tables 80: cells fold, and no cell is cut.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from .allocator import COMPUTE
from .meter import LIBRARIES, OWNERS

RANKS_PER_TABLE = 3  # Columns of ranks that fit 80 characters besides the names of modules
COMPUTE_BOUND = 0.75  # Fraction of a step that a device computes, from which on computing limits the step
MIN_SHOWN_FRACTION = 0.01  # Smallest fraction of the peak that the summary names


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


# -- summary


def build_summary(plan: Mapping[str, Any], *, has_times: bool = True, more: Mapping[str, str] | None = None) -> Table:
    """Return about ten lines on a plan: names and values. `has_times`: whether the times of its device are known."""
    rows = dict(_summarize(plan)) if has_times else {**dict(_summarize(plan)), "step": "", "limited by": ""}
    return new_grid({**rows, **(more or {})})


def new_grid(rows: Mapping[str, str]) -> Table:
    """Return a grid of names and values, without empty values."""
    made = Table.grid(padding=(0, 2, 0, 0))
    made.add_column(no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in rows.items():
        if value:
            made.add_row(name, value)
    return made


def _summarize(plan: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    largest = max(plan["ranks"], key=lambda each: each["peak_reserved_bytes"])
    yield "layout", f"{plan['strategy']} on {plan['world_size']:,} ranks: {plan['mesh']}"
    yield "device", plan["device"]
    reserved, usable = format_size(plan["peak_reserved_bytes"]), format_size(plan["usable_bytes"])
    yield "fits", f"{'yes' if plan['fits'] else 'NO'}: {reserved} per rank at the peak, of {usable} usable"
    yield "memory", format_parts(largest["peak_by_owner"])
    if "tokens_per_second_per_device" in plan:
        each_device = plan["tokens_per_second_per_device"]
        mfu = f"; MFU {plan['mfu']:.1%}" if plan.get("mfu") is not None else ""
        every = each_device * plan["world_size"]
        yield (
            "step",
            f"{format_seconds(plan['step_seconds'])}: {every:,.0f} tokens/s, {each_device:,.0f} per device{mfu}",
        )
    calls, size = (sum(row[key] for row in plan["collectives"]) for key in ("calls", "bytes"))
    yield "communication", f"{format_size(size)} in {calls:,} collectives per rank and step" if calls else "none"
    yield "limited by", describe_limit(plan)


def format_parts(sizes: Mapping[str, int]) -> str:
    """Return the largest owners of memory, and the sum of the others."""
    total = sum(sizes.values())
    shown = sorted(sizes, key=lambda owner: -sizes[owner])
    shown = [owner for owner in shown if sizes[owner] >= MIN_SHOWN_FRACTION * total and owner != "other"]
    rest = total - sum(sizes[owner] for owner in shown)
    parts = [f"{owner} {format_size(sizes[owner])}" for owner in shown]
    return ", ".join([*parts, *([f"other {format_size(rest)}"] if rest else [])])


def describe_limit(plan: Mapping[str, Any]) -> str:
    """Return what limits the layout: memory if it does not fit, or what the slowest rank spends its step on."""
    if not plan["fits"]:
        return "memory"
    slowest = max(plan["ranks"], key=lambda each: each["step_seconds"])
    busy, seconds = slowest["busy_seconds"], slowest["step_seconds"]
    computing = busy.get(COMPUTE, 0.0)
    share = f"the device computes {computing / seconds:.0%} of the step"
    if computing >= COMPUTE_BOUND * seconds:
        return f"computing: {share}"
    # Communication can explain at most the time in which its streams are busy.
    communicating = sum(time for stream, time in busy.items() if stream != COMPUTE)
    if communicating >= (seconds - computing) / 2:
        return f"communication: {share}"
    if "pp=" in plan["mesh"]:
        return f"the pipeline, whose stages wait for each other: {share}"
    return f"the host, which starts operators too slowly: {share}"


# -- tables


def build_tables(plan: Mapping[str, Any]) -> list[Table | Text]:
    """Return tables of memory by owner, activations, time and collectives; ranks with equal numbers share a column."""
    tables: list[Table | Text] = []
    for ranks in _chunk_ranks(plan, ("peak_by_owner", "peak_reserved_bytes", "persistent_bytes", "peak_operator")):
        tables.append(_memory_table(ranks))
        tables += [Text(f"operator at the peak of {name}: {each['peak_operator']}\n") for name, each in ranks.items()]
    for ranks in _chunk_ranks(plan, ("activations_by_module",)):
        tables.append(_build_rank_table("activations at the peak", "activations_by_module", ranks))
    for ranks in _chunk_ranks(plan, ("busy_seconds", "step_seconds")):
        tables.append(_time_table(ranks))
    for ranks in _chunk_ranks(plan, ("collectives",), most=1):
        tables.append(_collective_table(*ranks.items()))
    return tables


def new_table(title: str, columns: Sequence[str], left: Sequence[str] = ()) -> Table:
    """Return a table whose columns are aligned right, except those in `left`, which fold if they are too wide."""
    made = Table(title=title, title_justify="left")
    for name in columns:
        is_left = name in left
        made.add_column(name, justify="left" if is_left else "right", overflow="fold", no_wrap=not is_left)
    return made


def _chunk_ranks(
    plan: Mapping[str, Any], keys: Sequence[str], most: int = RANKS_PER_TABLE
) -> list[dict[str, Mapping[str, Any]]]:
    """Return reports by the names of the ranks that agree in `keys`, in chunks that fit a table."""
    alike: dict[str, list[Mapping[str, Any]]] = {}
    for each in plan["ranks"]:
        alike.setdefault(json.dumps([each[key] for key in keys]), []).append(each)
    named = [(_name_ranks(reports), reports[0]) for reports in alike.values()]
    return [dict(named[start : start + most]) for start in range(0, len(named), most)]


def _name_ranks(reports: Sequence[Mapping[str, Any]]) -> str:
    return f"rank{'s' if len(reports) > 1 else ''} {', '.join(str(each['rank']) for each in reports)}"


def _fill_rows(
    made: Table, key: str, names: Iterable[str], ranks: Mapping[str, Mapping[str, Any]], format_value: Any = format_size
) -> None:
    for name in names:
        values = [each[key].get(name) for each in ranks.values()]
        if any(values):
            made.add_row(name or "(model)", *(format_value(value) if value else "" for value in values))


def _memory_table(ranks: Mapping[str, Mapping[str, Any]]) -> Table:
    made = new_table("peak memory by owner", ("owner", *ranks), left=("owner",))
    _fill_rows(made, "peak_by_owner", (*OWNERS, LIBRARIES), ranks)
    made.add_section()
    for name, key in (("peak", "peak_allocated_bytes"), ("reserved", "peak_reserved_bytes")):
        made.add_row(name, *(format_size(each[key]) for each in ranks.values()))
    made.add_row("between steps", *(format_size(each["persistent_bytes"]) for each in ranks.values()))
    return made


def _build_rank_table(title: str, key: str, ranks: Mapping[str, Mapping[str, Any]]) -> Table:
    made = new_table(title, ("module", *ranks), left=("module",))
    sizes = {module: 0 for each in ranks.values() for module in each[key]}
    largest = {module: max(each[key].get(module, 0) for each in ranks.values()) for module in sizes}
    _fill_rows(made, key, sorted(largest, key=lambda module: -largest[module]), ranks)
    return made


def _time_table(ranks: Mapping[str, Mapping[str, Any]]) -> Table:
    made = new_table("busy time by stream", ("stream", *ranks), left=("stream",))
    streams = dict.fromkeys(name for each in ranks.values() for name in each["busy_seconds"])
    _fill_rows(made, "busy_seconds", streams, ranks, format_seconds)
    made.add_section()
    idle = [each["step_seconds"] - each["busy_seconds"].get(COMPUTE, 0.0) for each in ranks.values()]
    made.add_row("not computing", *map(format_seconds, idle))
    made.add_row("step", *(format_seconds(each["step_seconds"]) for each in ranks.values()))
    return made


def _collective_table(named: tuple[str, Mapping[str, Any]]) -> Table:
    left = ("collective", "group", "dtype")
    made = new_table(
        f"collectives of {named[0]} in a step", ("collective", "group", "ranks", "dtype", "calls", "size"), left
    )
    for row in named[1]["collectives"]:
        cells = [row["kind"], row["group"], f"{row['ranks']:,}", row["dtype"], f"{row['calls']:,}"]
        made.add_row(*cells, format_size(row["bytes"]))
    return made

"""Show a summary, and the differences of two, as tables for people; no torch here."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.plugin import new_console, plain, styled

from .summary import Summary

ROWS = 12
"""Operators that are shown."""
NAME_WIDTH = 16
"""Of the first column, at least: "forward_backward"."""


def shown(summary: Summary, *, rows: int = ROWS) -> Group:
    return Group(*_headline(summary), _parts(summary), *_communication(summary), _operators(summary, rows))


def _headline(summary: Summary) -> list[RenderableType]:
    about, steps, whole = summary.about, summary.steps, summary.seconds
    which = "one window" if not steps else f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    where = f" of {plain(about['run'])}" if "run" in about else ""
    layout = f" ({plain(about['strategy'])} on {plain(about['mesh'])})" if {"strategy", "mesh"} <= about.keys() else ""
    ranked = {"rank", "world_size"} <= about.keys()
    rank = f", rank {plain(about['rank'])} of {plain(about['world_size'])}" if ranked else ""
    busy = "the device computes" if summary.is_on_device else "computing"
    lines = [
        f"[bold]profile[/bold]{where}{layout}: {which}{rank}",
        f"{milliseconds(whole / summary.count)} a step: {busy} {_share(summary.computing_seconds, whole)}, "
        f"[bold]exposed communication {_share(summary.exposed_seconds, whole)}[/bold], "
        f"host gaps {_share(summary.host_seconds, whole)}",
    ]
    if summary.memory is not None:
        peak = summary.memory
        at = f" in {plain(peak.part)}" if peak.part else ""
        by = f", by {plain(peak.operator)}" if peak.operator else ""
        lines.append(f"memory: {peak.bytes / 1e6:,.1f} MB at the peak{at}{by}")
    return [styled(line) for line in lines]


def _parts(summary: Summary) -> Table:
    table = _table("part of the step", "times", "ms a step", "share", "computing", "exposed", "host")
    for row in summary.parts:
        times = (row.computing_seconds, row.exposed_seconds, row.host_seconds)
        table.add_row(
            row.name,
            str(row.calls),
            _per_step(row.seconds, summary),
            _share(row.seconds, summary.seconds),
            *(_per_step(each, summary) for each in times),
        )
    if not summary.parts:
        table.add_row("(none is marked)", *[""] * 6)
    return table


def _communication(summary: Summary) -> list[RenderableType]:
    if not summary.communication:
        return [Text("no communication was seen")]
    table = _table("communication", "ms a step", "exposed", "calls a step", "MB a step")
    for row in summary.communication:
        table.add_row(
            row.name,
            _per_step(row.seconds, summary),
            _per_step(row.exposed_seconds, summary),
            f"{row.calls / summary.count:,.4g}",
            "not known" if row.bytes is None else f"{row.bytes / summary.count / 1e6:,.3f}",
        )
    return [table]


def _operators(summary: Summary, rows: int) -> Table:
    on_device = summary.is_on_device
    columns = ["device ms a step", "host ms a step"] if on_device else ["ms a step"]
    table = _table("operator (itself)", *columns, "share", "calls a step")
    for row in summary.operators[:rows]:
        times = [row.device_seconds, row.seconds] if on_device else [row.seconds]
        per_step = [_per_step(each, summary) for each in times]
        table.add_row(row.name, *per_step, _share(times[0], summary.seconds), f"{row.calls / summary.count:,.4g}")
    left = summary.operators[rows:]
    if left:
        rest = sum(row.device_seconds if on_device else row.seconds for row in left)
        empty = [""] * (len(columns) - 1)
        table.add_row(f"{len(left)} others", _per_step(rest, summary), *empty, _share(rest, summary.seconds), "")
    return table


def as_svg(what: RenderableType, *, title: str) -> str:
    console = new_console(record=True, file=io.StringIO(), width=100, force_terminal=True)
    console.print(what)
    # rich refers to fonts on a server, which a picture must not fetch.
    return re.sub(r"@font-face \{.*?\}\s*", "", console.export_svg(title=title), flags=re.DOTALL)


@dataclass(frozen=True)
class Difference:
    """A row of two profiles: seconds and calls a step in each; 0 where one lacks it."""

    name: str
    before: float
    after: float
    calls: tuple[float, float] | None = None

    @property
    def seconds(self) -> float:
        return self.after - self.before


@dataclass(frozen=True)
class Comparison:
    """Two profiles side by side; all but `whole` by the size of the difference, the largest first."""

    names: tuple[str, str]
    whole: Sequence[Difference]
    parts: Sequence[Difference]
    communication: Sequence[Difference]
    operators: Sequence[Difference]

    def as_values(self) -> dict[str, Any]:
        return asdict(self)


def compare(first: Summary, second: Summary, names: tuple[str, str]) -> Comparison:
    """Compare two profiles by step: operators on an accelerator by their kernels' time, on a CPU by their own."""
    both = (first, second)
    on_device = first.is_on_device and second.is_on_device
    totals = {
        "time": "seconds",
        "computing": "computing_seconds",
        "communication": "communication_seconds",
        "exposed communication": "exposed_seconds",
        "host gaps": "host_seconds",
    }
    return Comparison(
        names,
        [Difference(name, *(getattr(each, key) / each.count for each in both)) for name, key in totals.items()],
        _compared(both, "parts", "seconds"),
        _compared(both, "communication", "seconds"),
        _compared(both, "operators", "device_seconds" if on_device else "seconds"),
    )


def _compared(both: tuple[Summary, Summary], table: str, seconds: str) -> list[Difference]:
    rows: list[dict[str, Any]] = [{row.name: row for row in getattr(each, table)} for each in both]

    def of(name: str, attribute: str) -> tuple[float, float]:
        before, after = (
            getattr(own[name], attribute) / each.count if name in own else 0.0
            for own, each in zip(rows, both, strict=True)
        )
        return before, after

    found = [Difference(name, *of(name, seconds), calls=of(name, "calls")) for name in {**rows[0], **rows[1]}]
    return sorted(found, key=lambda difference: (-abs(difference.seconds), difference.name))


def compared(comparison: Comparison, *, rows: int = ROWS) -> Group:
    first, second = comparison.names
    title = styled(f"[bold]A[/bold] {plain(first)}\n[bold]B[/bold] {plain(second)}")
    tables = [
        _differences("a step", comparison.whole, len(comparison.whole)),
        _differences("part of the step", comparison.parts, rows),
        _differences("communication", comparison.communication, rows),
        _differences("operator (itself)", comparison.operators, rows),
    ]
    return Group(title, *(table for table in tables if table.row_count))


def _differences(name: str, rows: Sequence[Difference], most: int) -> Table:
    table = _table(name, "A ms", "B ms", "B - A", "change", "calls A", "calls B")
    for row in rows[:most]:
        color = "red" if row.seconds > 0 else "green" if row.seconds < 0 else ""
        calls: list[str | Text] = ["", ""] if row.calls is None else [f"{each:,.4g}" for each in row.calls]
        if row.calls is not None and row.calls[0] != row.calls[1]:
            calls[1] = styled(f"[bold]{calls[1]}[/bold]")
        difference = milliseconds(row.seconds, unit="", sign="+")
        percent = f"{100 * (row.after / row.before - 1):+,.1f} %" if row.before else ""
        table.add_row(
            row.name,
            milliseconds(row.before, unit=""),
            milliseconds(row.after, unit=""),
            styled(f"[{color}]{difference}[/{color}]") if color else difference,
            "new" if not row.before and row.after else "gone" if not row.after and row.before else percent,
            *calls,
        )
    if len(rows) > most:
        rest = sum(row.seconds for row in rows[most:])
        table.add_row(f"{len(rows) - most} others", "", "", milliseconds(rest, unit="", sign="+"), "", "", "")
    return table


def _table(name: str, *columns: str) -> Table:
    table = Table(header_style="bold")
    # Names are not cut off: they are what one looks for.
    table.add_column(name, min_width=NAME_WIDTH, overflow="fold")
    for column in columns:
        table.add_column(column, justify="right", overflow="fold")
    return table


def _per_step(seconds: float, summary: Summary) -> str:
    return milliseconds(seconds / summary.count, unit="")


def milliseconds(seconds: float, *, unit: str = " ms", sign: str = "") -> str:
    """Write a time with about four digits."""
    value = seconds * 1e3
    digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2 if abs(value) >= 10 else 3
    return f"{value:{sign},.{digits}f}{unit}"


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"

"""A summary, and what two of them differ in, as tables for people; no torch here."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..files.terminal import new_console, plain, styled
from .compare import Comparison, Difference
from .summary import Summary

ROWS = 12
"""Operators that are shown."""
NAME_WIDTH = 16
"""Of the first column, at least: "forward_backward"."""


def shown(summary: Summary, *, rows: int = ROWS) -> Group:
    """What a window's time went to, its parts, communication, and the operators that take most."""
    return Group(*_headline(summary), _parts(summary), *_communication(summary), _operators(summary, rows))


def _headline(summary: Summary) -> list[RenderableType]:
    about, steps = summary.about, summary.steps
    which = "one window" if not steps else f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    where = f" of {plain(about['run'])}" if "run" in about else ""
    layout = f" ({plain(about['strategy'])} on {plain(about['mesh'])})" if {"strategy", "mesh"} <= about.keys() else ""
    rank = (
        f", rank {plain(about['rank'])} of {plain(about['world_size'])}"
        if {"rank", "world_size"} <= about.keys()
        else ""
    )
    whole = summary.seconds
    busy = "the device computes" if summary.is_on_device else "computing"
    lines = [
        f"[bold]profile[/bold]{where}{layout}: {which}{rank}",
        f"{milliseconds(whole / summary.count)} a step: {busy} {share(summary.computing_seconds, whole)}, "
        f"[bold]exposed communication {share(summary.exposed_seconds, whole)}[/bold], "
        f"host gaps {share(summary.host_seconds, whole)}",
    ]
    if summary.memory is not None:
        peak = summary.memory
        at = f" in {plain(peak.part)}" if peak.part else ""
        by = f", by {plain(peak.operator)}" if peak.operator else ""
        lines.append(f"memory: {megabytes(peak.bytes)} at the peak{at}{by}")
    return [styled(line) for line in lines]


def _parts(summary: Summary) -> Table:
    table = _table("part of the step", "times", "ms a step", "share", "computing", "exposed", "host")
    for row in summary.parts:
        table.add_row(
            row.name,
            str(row.calls),
            _per_step(row.seconds, summary),
            share(row.seconds, summary.seconds),
            _per_step(row.computing_seconds, summary),
            _per_step(row.exposed_seconds, summary),
            _per_step(row.host_seconds, summary),
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
    total = summary.seconds
    for row in summary.operators[:rows]:
        seconds = row.device_seconds if on_device else row.seconds
        times = [row.device_seconds, row.seconds] if on_device else [row.seconds]
        table.add_row(
            row.name,
            *(_per_step(each, summary) for each in times),
            share(seconds, total),
            f"{row.calls / summary.count:,.4g}",
        )
    left = summary.operators[rows:]
    if left:
        rest = sum(row.device_seconds if on_device else row.seconds for row in left)
        empty = [""] * (len(columns) - 1)
        table.add_row(f"{len(left)} others", _per_step(rest, summary), *empty, share(rest, total), "")
    return table


def as_svg(what: RenderableType, *, title: str) -> str:
    """A picture of a terminal that shows it."""
    console = new_console(record=True, file=io.StringIO(), width=100, force_terminal=True)
    console.print(what)
    # rich names fonts on a server, which a picture is not to ask.
    return re.sub(r"@font-face \{.*?\}\s*", "", console.export_svg(title=title), flags=re.DOTALL)


# -- two of them


def compared(comparison: Comparison, *, rows: int = ROWS) -> Group:
    """What got slower and faster, by what makes most of the difference."""
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
        table.add_row(
            row.name,
            milliseconds(row.before, unit=""),
            milliseconds(row.after, unit=""),
            styled(f"[{color}]{difference}[/{color}]") if color else difference,
            "new" if not row.before and row.after else "gone" if not row.after and row.before else _percent(row),
            *calls,
        )
    if len(rows) > most:
        rest = sum(row.seconds for row in rows[most:])
        table.add_row(f"{len(rows) - most} others", "", "", milliseconds(rest, unit="", sign="+"), "", "", "")
    return table


def _percent(row: Difference) -> str:
    return f"{100 * (row.after / row.before - 1):+,.1f} %" if row.before else ""


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
    """To about four digits."""
    value = seconds * 1e3
    digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2 if abs(value) >= 10 else 3
    return f"{value:{sign},.{digits}f}{unit}"


def megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"


def share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"

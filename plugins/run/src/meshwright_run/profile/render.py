"""Render a summary, and the differences between two, as tables. This module does not import torch."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.plugin import create_console, escape_markup, parse_markup

from .summary import ProfileSummary

DEFAULT_ROWS = 12
"""Number of operators that are shown."""
MIN_NAME_WIDTH = 16
"""Minimum width of the first column, for "forward_backward"."""


def render_summary(summary: ProfileSummary, *, rows: int = DEFAULT_ROWS) -> Group:
    return Group(
        *_render_headline(summary),
        _render_phases(summary),
        *_render_communication(summary),
        _render_operators(summary, rows),
    )


def _render_headline(summary: ProfileSummary) -> list[RenderableType]:
    about, steps, seconds = summary.metadata, summary.steps, summary.seconds
    which = "one window" if not steps else f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    where = f" of {escape_markup(about['run'])}" if "run" in about else ""
    layout = (
        f" ({escape_markup(about['strategy'])} on {escape_markup(about['mesh'])})"
        if {"strategy", "mesh"} <= about.keys()
        else ""
    )
    ranked = {"rank", "world_size"} <= about.keys()
    rank = f", rank {escape_markup(about['rank'])} of {escape_markup(about['world_size'])}" if ranked else ""
    busy = "the device computes" if summary.is_on_device else "computing"
    lines = [
        f"[bold]profile[/bold]{where}{layout}: {which}{rank}",
        f"{format_ms(seconds / summary.num_steps)} per step: "
        f"{busy} {_format_share(summary.computing_seconds, seconds)}, "
        f"[bold]exposed communication {_format_share(summary.exposed_seconds, seconds)}[/bold], "
        f"host gaps {_format_share(summary.host_seconds, seconds)}",
    ]
    if summary.memory is not None:
        peak = summary.memory
        at = f" in {escape_markup(peak.phase)}" if peak.phase else ""
        by = f", by {escape_markup(peak.operator)}" if peak.operator else ""
        lines.append(f"memory: {peak.bytes / 1e6:,.1f} MB at the peak{at}{by}")
    return [parse_markup(line) for line in lines]


def _render_phases(summary: ProfileSummary) -> Table:
    table = _build_table("phase", "times", "ms per step", "share", "computing", "exposed", "host")
    for row in summary.phases:
        times = (row.computing_seconds, row.exposed_seconds, row.host_seconds)
        table.add_row(
            row.name,
            str(row.calls),
            _format_per_step(row.seconds, summary),
            _format_share(row.seconds, summary.seconds),
            *(_format_per_step(each, summary) for each in times),
        )
    if not summary.phases:
        table.add_row("(none marked)", *[""] * 6)
    return table


def _render_communication(summary: ProfileSummary) -> list[RenderableType]:
    if not summary.communication:
        return [Text("no communication was recorded")]
    table = _build_table("communication", "ms per step", "exposed", "calls per step", "MB per step")
    for row in summary.communication:
        table.add_row(
            row.name,
            _format_per_step(row.seconds, summary),
            _format_per_step(row.exposed_seconds, summary),
            f"{row.calls / summary.num_steps:,.4g}",
            "unknown" if row.bytes is None else f"{row.bytes / summary.num_steps / 1e6:,.3f}",
        )
    return [table]


def _render_operators(summary: ProfileSummary, rows: int) -> Table:
    on_device = summary.is_on_device
    columns = ["device ms per step", "host ms per step"] if on_device else ["ms per step"]
    table = _build_table("operator (self)", *columns, "share", "calls per step")
    for row in summary.operators[:rows]:
        times = [row.device_seconds, row.seconds] if on_device else [row.seconds]
        per_step = [_format_per_step(each, summary) for each in times]
        table.add_row(
            row.name, *per_step, _format_share(times[0], summary.seconds), f"{row.calls / summary.num_steps:,.4g}"
        )
    left = summary.operators[rows:]
    if left:
        rest = sum(row.device_seconds if on_device else row.seconds for row in left)
        empty = [""] * (len(columns) - 1)
        table.add_row(
            f"{len(left)} others", _format_per_step(rest, summary), *empty, _format_share(rest, summary.seconds), ""
        )
    return table


def to_svg(renderable: RenderableType, *, title: str) -> str:
    console = create_console(record=True, file=io.StringIO(), width=100, force_terminal=True)
    console.print(renderable)
    # rich links to fonts on a server, which an image must not load.
    return re.sub(r"@font-face \{.*?\}\s*", "", console.export_svg(title=title), flags=re.DOTALL)


@dataclass(frozen=True)
class ProfileDifference:
    """A row of two profiles: seconds and calls per step in each; 0 if a profile lacks it."""

    name: str
    before: float
    after: float
    calls: tuple[float, float] | None = None

    @property
    def seconds(self) -> float:
        return self.after - self.before


@dataclass(frozen=True)
class ProfileComparison:
    """Two profiles side by side; rows other than `totals` are sorted by their difference, the largest first."""

    names: tuple[str, str]
    totals: Sequence[ProfileDifference]
    phases: Sequence[ProfileDifference]
    communication: Sequence[ProfileDifference]
    operators: Sequence[ProfileDifference]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def compare_profiles(first: ProfileSummary, second: ProfileSummary, names: tuple[str, str]) -> ProfileComparison:
    """Compare two profiles per step: operators by kernel time if both ran on an accelerator, else by host self time."""
    both = (first, second)
    on_device = first.is_on_device and second.is_on_device
    totals = {
        "time": "seconds",
        "computing": "computing_seconds",
        "communication": "communication_seconds",
        "exposed communication": "exposed_seconds",
        "host gaps": "host_seconds",
    }
    return ProfileComparison(
        names,
        [
            ProfileDifference(name, *(getattr(each, key) / each.num_steps for each in both))
            for name, key in totals.items()
        ],
        _compare_rows(both, "phases", "seconds"),
        _compare_rows(both, "communication", "seconds"),
        _compare_rows(both, "operators", "device_seconds" if on_device else "seconds"),
    )


def _compare_rows(
    summaries: tuple[ProfileSummary, ProfileSummary], table: str, time_field: str
) -> list[ProfileDifference]:
    rows: list[dict[str, Any]] = [{row.name: row for row in getattr(each, table)} for each in summaries]

    def of(name: str, attribute: str) -> tuple[float, float]:
        before, after = (
            getattr(own[name], attribute) / each.num_steps if name in own else 0.0
            for own, each in zip(rows, summaries, strict=True)
        )
        return before, after

    found = [ProfileDifference(name, *of(name, time_field), calls=of(name, "calls")) for name in {**rows[0], **rows[1]}]
    return sorted(found, key=lambda difference: (-abs(difference.seconds), difference.name))


def render_comparison(comparison: ProfileComparison, *, rows: int = DEFAULT_ROWS) -> Group:
    first, second = comparison.names
    title = parse_markup(f"[bold]A[/bold] {escape_markup(first)}\n[bold]B[/bold] {escape_markup(second)}")
    tables = [
        _render_differences("per step", comparison.totals, len(comparison.totals)),
        _render_differences("phase", comparison.phases, rows),
        _render_differences("communication", comparison.communication, rows),
        _render_differences("operator (self)", comparison.operators, rows),
    ]
    return Group(title, *(table for table in tables if table.row_count))


def _render_differences(name: str, rows: Sequence[ProfileDifference], max_rows: int) -> Table:
    table = _build_table(name, "A ms", "B ms", "B - A", "change", "calls A", "calls B")
    for row in rows[:max_rows]:
        color = "red" if row.seconds > 0 else "green" if row.seconds < 0 else ""
        calls: list[str | Text] = ["", ""] if row.calls is None else [f"{each:,.4g}" for each in row.calls]
        if row.calls is not None and row.calls[0] != row.calls[1]:
            calls[1] = parse_markup(f"[bold]{calls[1]}[/bold]")
        difference = format_ms(row.seconds, unit="", sign="+")
        percent = f"{100 * (row.after / row.before - 1):+,.1f} %" if row.before else ""
        table.add_row(
            row.name,
            format_ms(row.before, unit=""),
            format_ms(row.after, unit=""),
            parse_markup(f"[{color}]{difference}[/{color}]") if color else difference,
            "new" if not row.before and row.after else "gone" if not row.after and row.before else percent,
            *calls,
        )
    if len(rows) > max_rows:
        rest = sum(row.seconds for row in rows[max_rows:])
        table.add_row(f"{len(rows) - max_rows} others", "", "", format_ms(rest, unit="", sign="+"), "", "", "")
    return table


def _build_table(name: str, *columns: str) -> Table:
    table = Table(header_style="bold")
    # Names are wrapped rather than truncated, since readers search for them.
    table.add_column(name, min_width=MIN_NAME_WIDTH, overflow="fold")
    for column in columns:
        table.add_column(column, justify="right", overflow="fold")
    return table


def _format_per_step(seconds: float, summary: ProfileSummary) -> str:
    return format_ms(seconds / summary.num_steps, unit="")


def format_ms(seconds: float, *, unit: str = " ms", sign: str = "") -> str:
    """Format a time in milliseconds with about four digits."""
    value = seconds * 1e3
    digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2 if abs(value) >= 10 else 3
    return f"{value:{sign},.{digits}f}{unit}"


def _format_share(part: float, total: float) -> str:
    return f"{100 * part / total:.1f} %" if total else "-"

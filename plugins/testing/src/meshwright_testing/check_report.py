"""Output of `meshwright check`: a progress bar, a table, the reasons, a summary line and JSON."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text

from meshwright.plugin import parse_markup

from .cells import Cell, Result

# In a traceback, the machine-specific part of paths.
_MACHINE_PATH = re.compile(r'File ".*?/(?:site-packages/|(?=(?:core|plugins|tests)/))')

_STATUS_LABELS: dict[str, str | Text] = {
    "passed": "ok",
    "failed": parse_markup("[bold red]FAILED[/]"),
    "does not apply": "-",
}


def run_cells(cells: Sequence[Cell], *, json_file: Path | None, resume: bool, console: Console) -> list[Result]:
    """Run all cells with a progress bar; write each result to `json_file` at once.

    Args:
        resume: whether to skip cells whose results are in `json_file`.
        console: console of the progress bar.
    """
    records = _read(json_file) if resume and json_file is not None else {}
    results = []
    for cell in track(cells, description=f"checking {cells[0].strategy}", console=console, transient=True):
        if str(cell) in records:
            record = records[str(cell)]
            results.append(Result(cell, record["status"], record["detail"], record["worst"]))
            continue
        result = cell.run()
        results.append(result)
        if json_file is not None:
            records[str(cell)] = result_to_dict(result)
            _write(json_file, records)
    return results


def result_to_dict(result: Result) -> dict[str, Any]:
    """Return a result as plain values."""
    cell = result.cell
    return {
        "strategy": cell.strategy,
        "layout": cell.layout,
        "ranks": cell.ranks,
        "case": cell.name,
        "config": dict(cell.config),
        "device": cell.device,
        "status": result.status,
        "worst": result.worst,
        "detail": _MACHINE_PATH.sub('File "', result.detail),
    }


def render_table(results: Iterable[Result]) -> Table:
    """Return a table of cases by layouts."""
    found = {(result.cell.name, result.cell.layout): result for result in results}
    names = list(dict.fromkeys(name for name, _ in found))
    layouts = list(dict.fromkeys(layout for _, layout in found))
    table = Table("", *layouts, box=None, pad_edge=False)
    for name in names:
        row = [found.get((name, layout)) for layout in layouts]
        table.add_row(name, *(_STATUS_LABELS[result.status] if result else "" for result in row))
    return table


def format_reasons(results: Iterable[Result]) -> list[str]:
    """Return for each detail of results its status, cells and text."""
    found: dict[tuple[str, str], list[str]] = {}
    for result in results:
        if result.detail:
            found.setdefault((result.status, result.detail), []).append(str(result.cell))
    return [f"{status}: {', '.join(cells)}\n  {detail}" for (status, detail), cells in found.items()]


def format_summary(results: Sequence[Result]) -> str:
    """Return the summary line: how many cells passed and failed."""
    counts = {status: sum(result.status == status for result in results) for status in _STATUS_LABELS}
    return f"{counts['passed']} passed, {counts['failed']} failed"


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))["cells"] if path.is_file() else {}


def build_report(records: Mapping[str, Any]) -> dict[str, Any]:
    """Return results by cell, with the versions that they were found with."""
    return {
        "date": date.today().isoformat(),
        "versions": {name: version(name) for name in ("meshwright", "torch", "transformers")},
        "python": platform.python_version(),
        "cells": records,
    }


def _write(path: Path, records: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(build_report(records), indent=1) + "\n", encoding="utf-8")
    partial.replace(path)

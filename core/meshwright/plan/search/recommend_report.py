"""The layouts that a search has found as tables for a terminal, and the best as lines for --set."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table

REASONS = 8
"""Why others lost: so many of the reasons, those of the most layouts."""


def tables(found: Mapping[str, Any]) -> list[Any]:
    """What is printed of `recommend`: the best, why others lost, what is open, and how to have the best."""
    best = found["best"][0]
    command = " ".join(f"--set {shlex.quote(each)}" for each in best["assignments"])
    told = [_best(found), _lost(found)]
    if found["open"]:
        told.append(_open(found))
    return [
        *told,
        f"\nThe best: meshwright plan RUN --world {found['world_size']} {command}",
        f"\n{found['enumerated']:,} layouts, {found['traced']} looked at, {found['planned']} planned, in "
        f"{found['seconds']:.0f} s. What was expected of those lay {found['deviation']:.0%} off.",
    ]


def _best(found: Mapping[str, Any]) -> Table:
    table = Table(title=f"the fastest layouts on {found['world_size']} x {found['device']} that fit")
    for name in ("", "step [s]", "tokens/s/device", "reserved [GiB]", "rows"):
        table.add_column(name, justify="right")
    for name in ("mesh", "recomputed", "strategy"):
        table.add_column(name)
    for number, each in enumerate(found["best"], 1):
        nearly = "" if each["plan"] else "~"
        sizes = (f"{nearly}{each['step_seconds']:.4g}", f"{each['tokens_per_second_per_device']:,.0f}")
        memory = f"{each['peak_reserved_bytes'] / 2**30:.2f}"
        table.add_row(str(number), *sizes, memory, str(each["micro_batch_size"]), *_described(each))
    return table


def _described(each: Mapping[str, Any]) -> Iterator[str]:
    recomputed = each["recomputation"]
    yield each["mesh"]
    yield "none" if recomputed in (False, None) else str(recomputed)
    yield each["options"]


def _lost(found: Mapping[str, Any]) -> Table:
    table = Table(title="why others are not among them")
    table.add_column("layouts", justify="right")
    table.add_column("for instance")
    for row in found["lost"][:REASONS]:
        table.add_row(f"{row['layouts']:,}", row["reason"])
    others = found["lost"][REASONS:]
    if others:
        table.add_row(f"{sum(row['layouts'] for row in others):,}", f"{len(others)} other reasons")
    return table


def _open(found: Mapping[str, Any]) -> Table:
    table = Table(title=f"not looked at: {found['open_layouts']:,} that could be as fast, the likeliest first")
    for name in ("expected [s]", "rows"):
        table.add_column(name, justify="right")
    for name in ("mesh", "recomputed", "strategy"):
        table.add_column(name)
    for each in found["open"]:
        table.add_row(f"{each['expected_seconds']:.3g}", str(each["micro_batch_size"]), *_described(each))
    return table

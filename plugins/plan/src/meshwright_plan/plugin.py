"""Implement the hooks of this plugin. No torch in this module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from meshwright.plugin import RunSection, hookimpl

from .command import plan
from .config import PlanConfig
from .explain.command import explain

if TYPE_CHECKING:
    from meshwright_run.run_file import RunConfig

    from .comparison import Comparison


@hookimpl
def register_commands(app: typer.Typer) -> None:
    for command in (plan, explain):
        app.command()(command)


@hookimpl
def register_run_sections() -> list[RunSection]:
    description = "What is known of a run before it begins; see docs/plan.md."
    return [RunSection("plan", PlanConfig, description, default=PlanConfig())]


@hookimpl
def monitor_run(config: RunConfig, ranks: int) -> Comparison | None:
    from .comparison import compare

    return compare(config, ranks)


@hookimpl
def plan_run(config: RunConfig, ranks: int) -> list[Any]:
    from .comparison import plan_of
    from .report import tables

    return tables(plan_of(config, ranks))

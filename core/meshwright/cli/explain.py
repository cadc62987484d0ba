"""`meshwright explain`: what a run will do, in words."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from ..files.terminal import new_console
from ..launch.environment import started_by_launcher
from ..train.run_file import load_run
from .errors import told
from .imports import uncollected
from .plan import check_job


def explain(
    run_file: Annotated[Path, typer.Argument(help="A run file (YAML).")],
    world: Annotated[
        int | None, typer.Option(min=1, help="Ranks, which need not be there; default: as many as `train` would start.")
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a value, such as tp_size=2 or model.hidden_size=256."),
    ] = None,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show tracebacks of errors in the input.")] = False,
) -> None:
    """Say in words what a run will do: who holds what, what is sent when, and what comes of it. Starts nothing."""
    with told(traceback):
        config = load_run(run_file, assignments or [])
        if world is not None:
            check_job(config, world)
        if os.environ.get("RANK", "0") != "0":
            return
        with uncollected():
            from ..guide.explain.facts import facts_of
            from ..guide.explain.words import told as sections_of
            from ..train.plan import processes

        count = world or (int(os.environ["WORLD_SIZE"]) if started_by_launcher() else processes(config))
        console = new_console()
        for section in sections_of(facts_of(config, count)):
            console.print(section.title, style="bold", markup=False, highlight=False)
            for line in section.lines:
                console.print(f"  {line}", markup=False, highlight=False, soft_wrap=not console.is_terminal)
            console.print()

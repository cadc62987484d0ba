"""`meshwright explain`: what a run will do, in words."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from meshwright.plugin import Assignments, RunFile, Traceback, new_console, started_by_launcher, told, uncollected


def explain(
    run_file: RunFile,
    world: Annotated[
        int | None, typer.Option(min=1, help="Ranks, which need not be there; default: as many as `train` would start.")
    ] = None,
    assignments: Assignments = None,
    traceback: Traceback = False,
) -> None:
    """Say in words what a run will do: who holds what, what is sent when, and what comes of it. Starts nothing."""
    with told(traceback):
        from meshwright_run.run_file import load_run

        from ..command import check_job

        config = load_run(run_file, assignments or [])
        if world is not None:
            check_job(config, world)
        if os.environ.get("RANK", "0") != "0":
            return
        with uncollected():
            from meshwright_run.preflight import processes

            from .facts import facts_of
            from .words import sections_of

        count = world or (int(os.environ["WORLD_SIZE"]) if started_by_launcher() else processes(config))
        console = new_console()
        for title, lines in sections_of(facts_of(config, count)).items():
            console.print(title, style="bold", markup=False, highlight=False)
            for line in lines:
                console.print(f"  {line}", markup=False, highlight=False, soft_wrap=not console.is_terminal)
            console.print()

"""`meshwright train`: start the ranks of this node, or join those that a launcher has started."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from ..files.commands import Assignments, RunFile, Traceback, told, uncollected
from ..launch.environment import started_by_launcher
from ..launch.join import join
from ..launch.rank import leave
from ..strategy.registry import get_registry

if TYPE_CHECKING:
    from ..train.run.run_file import RunConfig


def train(
    run_file: RunFile,
    assignments: Assignments = None,
    plan_only: Annotated[
        bool, typer.Option("--plan-only", help="Show what the run would hold, send and take, and start nothing.")
    ] = False,
    timings: Annotated[
        bool, typer.Option("--timings", help="After the first step, print what each part of the way to it took.")
    ] = False,
    traceback: Traceback = False,
) -> None:
    """Train a model. Starts the ranks of this node itself, or joins those that a launcher has started."""
    from ..train.run.run_file import check_model, load_run
    from ..train.run.startup import Startup

    startup = Startup(timings)
    with told(traceback, everywhere=True):
        join()
    with told(traceback):
        config = load_run(run_file, assignments or [])
        if plan_only:
            with uncollected():
                check_model(config.model, config.data.seq_len)
            _plan_only(config)
            return
        if not started_by_launcher() and config.processes(get_registry().get(config.strategy).axes, 0) > 1:
            # The fork server imports torch and transformers while this process does, too.
            from ..launch.local import warm_up

            warm_up(["meshwright.train.run.run_rank"])
        with uncollected():
            if not started_by_launcher():
                check_model(config.model, config.data.seq_len)
            from ..plan.comparison import accompany
            from ..train.run.start import start

        startup.end("imports and run file")
        code = start(config, show_traceback=traceback, accompany=accompany, startup=startup)
    leave(code)


def _plan_only(config: RunConfig) -> None:
    """Show the plan of a run, once for all ranks that a launcher has started."""
    from ..plan.command import show
    from ..plan.comparison import plan_of
    from ..plan.report import tables
    from ..train.run.preflight import processes

    count = int(os.environ["WORLD_SIZE"]) if started_by_launcher() else processes(config)
    if os.environ.get("RANK", "0") == "0":
        show(tables(plan_of(config, count)))

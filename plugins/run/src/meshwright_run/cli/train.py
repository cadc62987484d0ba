"""`meshwright train`: start the ranks of this node, or join those that a launcher has started."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.plugin import (
    Assignments,
    ConfigError,
    RunFile,
    Traceback,
    get_registry,
    how_to_install,
    join,
    leave,
    output_console,
    started_by_launcher,
    told,
    uncollected,
)

if TYPE_CHECKING:
    from ..run_file import RunConfig


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
    from ..run_file import check_model, load_run
    from ..startup import Startup

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

            warm_up(["meshwright_run.run_rank"])
        with uncollected():
            if not started_by_launcher():
                check_model(config.model, config.data.seq_len)
            from ..start import start

        startup.end("imports and run file")
        code = start(config, show_traceback=traceback, startup=startup)
    leave(code)


def _plan_only(config: RunConfig) -> None:
    """Show the plan of a run, once for all ranks that a launcher has started."""
    from ..preflight import processes

    count = int(os.environ["WORLD_SIZE"]) if started_by_launcher() else processes(config)
    if os.environ.get("RANK", "0") != "0":
        return
    parts = get_registry().hook.plan_run(config=config, ranks=count)
    if parts is None:
        raise ConfigError(f"--plan-only needs a plugin that is not installed. {how_to_install('plan')}")
    console = output_console(200)
    for part in parts:
        console.print(part, highlight=False)

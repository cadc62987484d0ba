"""`meshwright train`: starts the ranks of this node, or joins those that a launcher has started."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..launch.join import join
from ..launch.rank import leave, started_by_launcher
from ..strategy.registry import get_registry
from ..train.run_file import load_run
from .errors import told


def train(
    run_file: Annotated[Path, typer.Argument(help="A run file (YAML).")],
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a value, such as tp_size=2 or model.hidden_size=256."),
    ] = None,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show tracebacks of errors in the input.")] = False,
) -> None:
    """Train a model. Starts the ranks of this node itself, or joins those that a launcher has started."""
    with told(traceback, everywhere=True):
        join()
    with told(traceback):
        config = load_run(run_file, assignments or [])
        if not started_by_launcher() and config.processes(get_registry().get(config.strategy).axes, 0) > 1:
            # The fork server imports torch and transformers while this process does, too.
            from ..launch.local import warm_up

            warm_up(["meshwright.train.run"])
        from ..train.run import start

        code = start(config, show_traceback=traceback)
    leave(code)

"""`meshwright replay`: does a step of a run again, and says whether it comes to the same."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from ..launch.environment import started_by_launcher
from ..launch.join import join
from ..launch.rank import leave
from .errors import told
from .imports import uncollected
from .output import JsonFile, tell

Run = Annotated[Path, typer.Argument(metavar="RUN", help="Directory of the run: its output_dir.")]


def replay(
    run: Run,
    step: Annotated[int, typer.Option("--step", min=1, help="Which step, from 1.")],
    single: Annotated[bool, typer.Option("--single", help="On one process, whatever the layout was.")] = False,
    compare_rank: Annotated[
        int | None,
        typer.Option("--compare-rank", min=0, help="A data rank whose work another does, too, compared bit for bit."),
    ] = None,
    json_file: JsonFile = None,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show tracebacks of errors in the input.")] = False,
) -> None:
    """Do a step of a run again, from the checkpoint before it: 0 if it comes to the same, 1 if not."""
    with told(traceback, everywhere=True):
        join()
    with told(traceback):
        if not started_by_launcher():
            from ..launch.local import warm_up

            warm_up(["meshwright.replay.rank"])
        with uncollected():
            from ..replay.start import replay as replayed
            from ..replay.told import shown

        found = replayed(run, step, single=single, compare_rank=compare_rank, show_traceback=traceback)
        if os.environ.get("RANK", "0") == "0":
            tell(shown(found), found.as_values(), json_file)
    leave(found.exit_code)

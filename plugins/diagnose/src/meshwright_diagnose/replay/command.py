"""`meshwright replay` does a step of a run again; `meshwright diff` finds the first difference of two runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from meshwright.plugin import JsonFile, Traceback, join, leave, started_by_launcher, tell, told, uncollected


def replay(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of the run: its output_dir.")],
    step: Annotated[int, typer.Option("--step", min=1, help="Which step, from 1.")],
    single: Annotated[bool, typer.Option("--single", help="On one process, whatever the layout was.")] = False,
    compare_rank: Annotated[
        int | None,
        typer.Option("--compare-rank", min=0, help="A data rank whose work another does, too, compared bit for bit."),
    ] = None,
    json_file: JsonFile = None,
    traceback: Traceback = False,
) -> None:
    """Do a step of a run again, from the checkpoint before it: 0 if it comes to the same, 1 if not."""
    with told(traceback, everywhere=True):
        join()
    with told(traceback):
        if not started_by_launcher():
            from meshwright_run.launch.local import warm_up

            warm_up(["meshwright_diagnose.replay.rank"])
        with uncollected():
            from .render import shown
            from .start import replay as replayed

        found = replayed(run, step, single=single, compare_rank=compare_rank, show_traceback=traceback)
        if os.environ.get("RANK", "0") == "0":
            tell(shown(found), found.as_values(), json_file)
    leave(found.exit_code)


def diff(
    one: Annotated[Path, typer.Argument(metavar="RUN_A", help="Directory of a run: its output_dir.")],
    other: Annotated[Path, typer.Argument(metavar="RUN_B", help="Another.")],
    rtol: Annotated[
        float | None, typer.Option("--rtol", help="Within which they are to agree, relatively; default: by dtype.")
    ] = None,
    step: Annotated[
        int | None, typer.Option("--step", min=1, help="Which step to do again; default: the first that parts.")
    ] = None,
    no_replay: Annotated[bool, typer.Option("--no-replay", help="Do none again.")] = False,
    float64: Annotated[
        bool, typer.Option("--float64", help="Do it again in float64, both from one checkpoint, to 1e-9.")
    ] = False,
    json_file: JsonFile = None,
    traceback: Traceback = False,
) -> None:
    """Find where two runs part: the first step, number, tensor and module. 0 if they agree, 1 if not."""
    with told(traceback):
        if not no_replay:
            from meshwright_run.launch.local import warm_up

            warm_up(["meshwright_diagnose.replay.rank"])
        with uncollected():
            from .diff import diff as compare
            from .render import compared

        found = compare(
            one, other, rtol=rtol, step=step, replays=not no_replay, float64=float64, show_traceback=traceback
        )
        tell(compared(found), found.as_values(), json_file)
    leave(found.exit_code)

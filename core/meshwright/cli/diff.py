"""`meshwright diff`: where two runs part, by their files and by the step done again in both layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..launch.rank import leave
from .errors import told
from .imports import uncollected
from .output import JsonFile, tell


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
    traceback: Annotated[bool, typer.Option("--traceback", help="Show tracebacks of errors in the input.")] = False,
) -> None:
    """Find where two runs part: the first step, number, tensor and module. 0 if they agree, 1 if not."""
    with told(traceback):
        if not no_replay:
            from ..launch.local import warm_up

            warm_up(["meshwright.replay.rank"])
        with uncollected():
            from ..replay.diff import diff as compare
            from ..replay.told import compared

        found = compare(
            one,
            other,
            rtol=rtol,
            step=step,
            replays=not no_replay,
            float64=float64,
            show_traceback=traceback,
        )
        tell(compared(found), found.as_values(), json_file)
    leave(found.exit_code)

"""Hooks and commands: `meshwright replay`, `diff`, `doctor`, `profile show` and `compare`. Imports no torch."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from meshwright.plugin import (
    JsonFile,
    Traceback,
    hookimpl,
    join,
    leave,
    say,
    started_by_launcher,
    tell,
    told,
    uncollected,
    write,
)


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

            warm_up(["meshwright_diagnose.replay.start"])
        with uncollected():
            from .replay.render import shown
            from .replay.start import replay as replayed

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

            warm_up(["meshwright_diagnose.replay.start"])
        with uncollected():
            from .replay.diff import diff as compare
            from .replay.render import compared

        found = compare(
            one, other, rtol=rtol, step=step, replays=not no_replay, float64=float64, show_traceback=traceback
        )
        tell(compared(found), found.as_values(), json_file)
    leave(found.exit_code)


def doctor(
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Look at a directory, too, in which runs would leave their results.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")] = False,
    traceback: Traceback = False,
) -> None:
    """Look at versions, devices, backends, links, files and clocks, and say what is wrong and how to mend it.

    Starts two ranks on this machine; under torchrun and the like it joins the ranks that are there.
    """
    with told(traceback, everywhere=True):
        join()
    with told(traceback):
        with uncollected():
            from .doctor.checks import as_lines, as_plain, exit_code
            from .doctor.examine import of_launched_ranks, of_local_ranks, of_machine

        if started_by_launcher():
            code, found = of_launched_ranks(directory)
        else:
            code, found = 0, [*of_machine(directory), *of_local_ranks()]
        if found and os.environ.get("RANK", "0") == "0":
            text = json.dumps(as_plain(found), indent=2) if as_json else "\n".join(as_lines(found))
            say(f"{text}\n")
            sys.stdout.flush()
    leave(code or exit_code(found))


Profile = Annotated[
    Path, typer.Argument(help="A run directory, or a trace (rank-*.json.gz) or summary.json in its directory profile.")
]
Rank = Annotated[int | None, typer.Option(min=0, help="Of which rank, in a directory; default: the first there is.")]
Rows = Annotated[int, typer.Option(min=1, help="How many operators to show.")]
SvgFile = Annotated[Path | None, typer.Option("--svg", help="Draw what is shown here.")]


def show(
    profile: Profile, rank: Rank = None, rows: Rows = 12, json_file: JsonFile = None, svg_file: SvgFile = None
) -> None:
    """Show what the time of profiled steps went to: parts, communication, operators, memory."""
    with told(traceback=False):
        from meshwright_run.profile.show import shown
        from meshwright_run.profile.summary import as_values, load_summary

        summary = load_summary(profile, rank=rank)
        _tell(shown(summary, rows=rows), as_values(summary), json_file, svg_file, title=f"profile show {profile}")


def compare(
    before: Annotated[Path, typer.Argument(metavar="A", help="A run directory, a trace, or a summary.json.")],
    after: Annotated[Path, typer.Argument(metavar="B", help="Another.")],
    rank: Rank = None,
    rows: Rows = 12,
    json_file: JsonFile = None,
    svg_file: SvgFile = None,
) -> None:
    """Put two profiles side by side: what got slower, and what faster, by what makes most of the difference."""
    with told(traceback=False):
        from meshwright_run.profile.show import compare as compared_of
        from meshwright_run.profile.show import compared
        from meshwright_run.profile.summary import load_summary

        first, second = (load_summary(path, rank=rank) for path in (before, after))
        comparison = compared_of(first, second, (str(before), str(after)))
        what = compared(comparison, rows=rows)
        _tell(what, comparison.as_values(), json_file, svg_file, title=f"profile compare {before} {after}")


def _tell(what: Any, values: dict[str, Any], json_file: Path | None, svg_file: Path | None, *, title: str) -> None:
    from meshwright_run.profile.show import as_svg

    tell(what, values, json_file)
    if svg_file is not None:
        write(svg_file, as_svg(what, title=title))


@hookimpl
def register_commands(app: typer.Typer) -> None:
    for command in (replay, diff, doctor):
        app.command()(command)
    profiles = typer.Typer(help="Look at profiles of steps.", no_args_is_help=True)
    profiles.command()(show)
    profiles.command()(compare)
    app.add_typer(profiles, name="profile")

"""Hooks and commands: `meshwright replay`, `diff`, `doctor`, `profile show` and `compare`. Imports no torch."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from meshwright.plugin import (
    JsonOption,
    TracebackOption,
    echo,
    exit_on_error,
    exit_process,
    gc_paused,
    hookimpl,
    is_launched,
    join_launcher,
    report_results,
    write_output_file,
)


def replay(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of the run: its output_dir.")],
    step: Annotated[int, typer.Option("--step", min=1, help="Which step, from 1.")],
    single: Annotated[bool, typer.Option("--single", help="On one process, whatever the layout was.")] = False,
    compare_rank: Annotated[
        int | None,
        typer.Option("--compare-rank", min=0, help="A data rank whose work another does, too, compared bit for bit."),
    ] = None,
    json_file: JsonOption = None,
    traceback: TracebackOption = False,
) -> None:
    """Do a step of a run again, from the checkpoint before it: 0 if it comes to the same, 1 if not."""
    with exit_on_error(traceback, on_all_ranks=True):
        join_launcher()
    with exit_on_error(traceback):
        if not is_launched():
            from meshwright_run.launch.local import start_fork_server

            start_fork_server(["meshwright_diagnose.replay.replay"])
        with gc_paused():
            from .replay.render import render_replay
            from .replay.replay import replay_step as replayed

        found = replayed(run, step, single=single, compare_rank=compare_rank, show_traceback=traceback)
        if os.environ.get("RANK", "0") == "0":
            report_results(render_replay(found), found.to_dict(), json_file)
    exit_process(found.exit_code)


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
    json_file: JsonOption = None,
    traceback: TracebackOption = False,
) -> None:
    """Find where two runs part: the first step, number, tensor and module. 0 if they agree, 1 if not."""
    with exit_on_error(traceback):
        if not no_replay:
            from meshwright_run.launch.local import start_fork_server

            start_fork_server(["meshwright_diagnose.replay.replay"])
        with gc_paused():
            from .replay.diff import diff_runs as compare
            from .replay.render import render_diff

        found = compare(
            one, other, rtol=rtol, step=step, replays=not no_replay, float64=float64, show_traceback=traceback
        )
        report_results(render_diff(found), found.to_dict(), json_file)
    exit_process(found.exit_code)


def doctor(
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Look at a directory, too, in which runs would leave their results.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")] = False,
    traceback: TracebackOption = False,
) -> None:
    """Look at versions, devices, backends, links, files and clocks, and say what is wrong and how to mend it.

    Starts two ranks on this machine; under torchrun and the like it joins the ranks that are there.
    """
    with exit_on_error(traceback, on_all_ranks=True):
        join_launcher()
    with exit_on_error(traceback):
        with gc_paused():
            from .doctor.checks import find_exit_code, format_results, to_dict
            from .doctor.rank_checks import check_launched_ranks, check_local_ranks, check_machine

        if is_launched():
            code, found = check_launched_ranks(directory)
        else:
            code, found = 0, [*check_machine(directory), *check_local_ranks()]
        if found and os.environ.get("RANK", "0") == "0":
            text = json.dumps(to_dict(found), indent=2) if as_json else "\n".join(format_results(found))
            echo(f"{text}\n")
            sys.stdout.flush()
    exit_process(code or find_exit_code(found))


ProfilePath = Annotated[
    Path, typer.Argument(help="A run directory, or a trace (rank-*.json.gz) or summary.json in its directory profile.")
]
RankOption = Annotated[
    int | None, typer.Option(min=0, help="Of which rank, in a directory; default: the first there is.")
]
RowsOption = Annotated[int, typer.Option(min=1, help="How many operators to show.")]
SvgFile = Annotated[Path | None, typer.Option("--svg", help="Draw what is shown here.")]


def show(
    profile: ProfilePath,
    rank: RankOption = None,
    rows: RowsOption = 12,
    json_file: JsonOption = None,
    svg_file: SvgFile = None,
) -> None:
    """Show what the time of profiled steps went to: parts, communication, operators, memory."""
    with exit_on_error(show_traceback=False):
        from meshwright_run.profile.render import render_summary
        from meshwright_run.profile.summary import load_summary, summary_to_dict

        summary = load_summary(profile, rank=rank)
        _output(
            render_summary(summary, rows=rows),
            summary_to_dict(summary),
            json_file,
            svg_file,
            title=f"profile show {profile}",
        )


def compare(
    before: Annotated[Path, typer.Argument(metavar="A", help="A run directory, a trace, or a summary.json.")],
    after: Annotated[Path, typer.Argument(metavar="B", help="Another.")],
    rank: RankOption = None,
    rows: RowsOption = 12,
    json_file: JsonOption = None,
    svg_file: SvgFile = None,
) -> None:
    """Put two profiles side by side: what got slower, and what faster, by what makes most of the difference."""
    with exit_on_error(show_traceback=False):
        from meshwright_run.profile.render import compare_profiles as compared_of
        from meshwright_run.profile.render import render_comparison
        from meshwright_run.profile.summary import load_summary

        first, second = (load_summary(path, rank=rank) for path in (before, after))
        comparison = compared_of(first, second, (str(before), str(after)))
        what = render_comparison(comparison, rows=rows)
        _output(what, comparison.to_dict(), json_file, svg_file, title=f"profile compare {before} {after}")


def _output(
    renderable: Any, values: dict[str, Any], json_file: Path | None, svg_file: Path | None, *, title: str
) -> None:
    from meshwright_run.profile.render import to_svg

    report_results(renderable, values, json_file)
    if svg_file is not None:
        write_output_file(svg_file, to_svg(renderable, title=title))


@hookimpl
def register_commands(app: typer.Typer) -> None:
    for command in (replay, diff, doctor):
        app.command()(command)
    profiles = typer.Typer(help="Look at profiles of steps.", no_args_is_help=True)
    profiles.command()(show)
    profiles.command()(compare)
    app.add_typer(profiles, name="profile")

"""Hooks and commands: `meshwright replay`, `diff`, `doctor`, `profile show` and `compare`. Imports no torch."""

from __future__ import annotations

import os
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
    write_json,
    write_output_file,
)


def replay(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of the run (its output_dir).")],
    step: Annotated[int, typer.Option("--step", min=1, help="The step to replay; the first is 1.")],
    single: Annotated[bool, typer.Option("--single", help="Replay on one process, whatever the layout was.")] = False,
    compare_rank: Annotated[
        int | None,
        typer.Option(
            "--compare-rank", min=0, help="Data rank whose work another rank repeats; the results are compared bitwise."
        ),
    ] = None,
    json_file: JsonOption = None,
    traceback: TracebackOption = False,
) -> None:
    """Replay a step of a run from the last checkpoint before it. Exits with 0 if the results are equal, else 1.

    \b
    Examples:
      meshwright replay runs/a --step 120
      meshwright replay runs/a --step 120 --single
    """
    with exit_on_error(traceback, on_all_ranks=True):
        join_launcher()
    with exit_on_error(traceback):
        if not is_launched():
            from meshwright_run.launch.local import start_fork_server

            start_fork_server(["meshwright_diagnose.replay.replay"])
        with gc_paused():
            from .replay.render import render_replay
            from .replay.replay import replay_step

        result = replay_step(run, step, single=single, compare_rank=compare_rank, show_traceback=traceback)
        if os.environ.get("RANK", "0") == "0":
            report_results(render_replay(result), result.to_dict(), json_file)
    exit_process(result.exit_code)


def diff(
    one: Annotated[Path, typer.Argument(metavar="RUN_A", help="Directory of a run (its output_dir).")],
    other: Annotated[Path, typer.Argument(metavar="RUN_B", help="Directory of the run to compare with.")],
    rtol: Annotated[float | None, typer.Option("--rtol", help="Relative tolerance; default: chosen by dtype.")] = None,
    step: Annotated[
        int | None, typer.Option("--step", min=1, help="Step to replay; default: the first that differs.")
    ] = None,
    no_replay: Annotated[bool, typer.Option("--no-replay", help="Compare metrics only; replay no step.")] = False,
    float64: Annotated[
        bool, typer.Option("--float64", help="Replay both in float64 from one checkpoint, with tolerance 1e-9.")
    ] = False,
    json_file: JsonOption = None,
    traceback: TracebackOption = False,
) -> None:
    """Find where two runs diverge: the first step, metric, tensor and module. Exits with 0 if they agree, else 1.

    \b
    Examples:
      meshwright diff runs/a runs/b
      meshwright diff runs/a runs/b --rtol 1e-4 --no-replay
    """
    with exit_on_error(traceback):
        if not no_replay:
            from meshwright_run.launch.local import start_fork_server

            start_fork_server(["meshwright_diagnose.replay.replay"])
        with gc_paused():
            from .replay.diff import diff_runs
            from .replay.render import render_diff

        result = diff_runs(
            one, other, rtol=rtol, step=step, replays=not no_replay, float64=float64, show_traceback=traceback
        )
        report_results(render_diff(result), result.to_dict(), json_file)
    exit_process(result.exit_code)


def doctor(
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Also check this directory, in which runs would write their results.")
    ] = None,
    json_file: JsonOption = None,
    traceback: TracebackOption = False,
) -> None:
    """Check versions, devices, backends, links, files and clocks, and print what is wrong and how to fix it.

    Starts two ranks on this machine; under torchrun or another launcher it joins the existing ranks.

    \b
    Examples:
      meshwright doctor --dir runs
      meshwright doctor --json -
    """
    with exit_on_error(traceback, on_all_ranks=True):
        join_launcher()
    with exit_on_error(traceback):
        with gc_paused():
            from .doctor.checks import find_exit_code, format_results, to_dict
            from .doctor.rank_checks import check_launched_ranks, check_local_ranks, check_machine

        if is_launched():
            code, findings = check_launched_ranks(directory)
        else:
            code, findings = 0, [*check_machine(directory), *check_local_ranks()]
        if findings and os.environ.get("RANK", "0") == "0" and not write_json(to_dict(findings), json_file):
            echo("\n".join(format_results(findings)) + "\n")
    exit_process(code or find_exit_code(findings))


ProfilePath = Annotated[
    Path, typer.Argument(help="A run directory, or a trace (rank-*.json.gz) or summary.json in its directory profile.")
]
RankOption = Annotated[
    int | None, typer.Option(min=0, help="Rank to show, if a directory is given; default: the first one found.")
]
RowsOption = Annotated[int, typer.Option(min=1, help="Number of operators to show.")]
SvgFile = Annotated[Path | None, typer.Option("--svg", help="Write the summary to this SVG file.")]


def show(
    profile: ProfilePath,
    rank: RankOption = None,
    rows: RowsOption = 12,
    json_file: JsonOption = None,
    svg_file: SvgFile = None,
) -> None:
    """Show where the time and memory of profiled steps went: phases, communication, operators.

    \b
    Examples:
      meshwright profile show runs/profiled
      meshwright profile show runs/profiled --rank 1 --svg profile.svg
    """
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
    after: Annotated[Path, typer.Argument(metavar="B", help="The profile to compare with.")],
    rank: RankOption = None,
    rows: RowsOption = 12,
    json_file: JsonOption = None,
    svg_file: SvgFile = None,
) -> None:
    """Compare two profiles, largest differences first.

    \b
    Examples:
      meshwright profile compare runs/before runs/after
      meshwright profile compare runs/before runs/after --rows 30
    """
    with exit_on_error(show_traceback=False):
        from meshwright_run.profile.render import compare_profiles, render_comparison
        from meshwright_run.profile.summary import load_summary

        first, second = (load_summary(path, rank=rank) for path in (before, after))
        comparison = compare_profiles(first, second, (str(before), str(after)))
        table = render_comparison(comparison, rows=rows)
        _output(table, comparison.to_dict(), json_file, svg_file, title=f"profile compare {before} {after}")


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
    profiles = typer.Typer(help="Show and compare profiles of steps.", no_args_is_help=True)
    profiles.command()(show)
    profiles.command()(compare)
    app.add_typer(profiles, name="profile")

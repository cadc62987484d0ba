"""Hooks and the commands `meshwright plan` and `meshwright explain`. Imports no torch."""

from __future__ import annotations

import os
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from meshwright.plugin import (
    ConfigError,
    JsonOption,
    RunFileArgument,
    RunSection,
    SetOption,
    TracebackOption,
    create_console,
    create_output_console,
    exit_on_error,
    exit_process,
    gc_paused,
    hookimpl,
    is_launched,
    join_launcher,
    validate_config,
    write_json,
)

from .config import PlanConfig

if TYPE_CHECKING:
    from meshwright_run.run_file import RunConfig

    from .config import DeviceSpec
    from .live import PlanMonitor
    from .trace import TrainingJob

DEFAULT_DEVICE = "h100-80gb"
OutputFiles: TypeAlias = tuple[Path | None, Path | None]

WorldOption = Annotated[
    int | None,
    typer.Option(min=1, help="Number of ranks, which need not exist; default: the number that `train` would start."),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        help="Device to plan for: a name such as h200, or your own YAML file; default: h100-80gb. With --calibrate: "
        "the device that supplies the figures that are not measured."
    ),
]
SearchSecondsOption = Annotated[
    float | None, typer.Option(min=1, help="With --gpus: time limit of the search in seconds; default: 105.")
]


def plan(
    run_file: Annotated[
        Path | None, typer.Argument(help="A run file (YAML). Its data are not read.", show_default=False)
    ] = None,
    world: WorldOption = None,
    details: Annotated[bool, typer.Option("--details", help="Print all tables, not only a summary.")] = False,
    device: DeviceOption = None,
    json_file: JsonOption = None,
    html_file: Annotated[Path | None, typer.Option("--html", help="Write a page with plots to this HTML file.")] = None,
    png_directory: Annotated[Path | None, typer.Option("--png", help="Write the plots to this directory.")] = None,
    assignments: SetOption = None,
    ranks: Annotated[
        list[int] | None, typer.Option("--rank", help="Trace this rank; default: one rank of each kind.")
    ] = None,
    expert_imbalance: Annotated[float, typer.Option(min=1.0, help="Load of the busiest experts over the mean.")] = 1.0,
    gpus: Annotated[int | None, typer.Option(help="Find the fastest layouts that fit on this many devices.")] = None,
    batch_tokens: Annotated[
        str | None, typer.Option(help="With --gpus: tokens per step, such as 4M (4 * 2**20); default: the run file's.")
    ] = None,
    max_nodes: Annotated[int | None, typer.Option(help="With --gpus: use at most this many nodes.")] = None,
    run_out: Annotated[
        Path | None, typer.Option("--write", help="With --gpus: write the best layout as a run file.")
    ] = None,
    search_seconds: SearchSecondsOption = None,
    calibrate: Annotated[Path | None, typer.Option(help="Measure this machine; write its device file here.")] = None,
    calibrated_ranks: Annotated[
        int | None, typer.Option("--ranks", min=1, help="With --calibrate: ranks that compute at the same time.")
    ] = None,
    traceback: TracebackOption = False,
) -> None:
    """Predict the memory, communication and step time of a run, or search for its fastest layout.

    \b
    Examples:
      meshwright plan run.yaml --world 64 --device h100-80gb
      meshwright plan run.yaml --gpus 64 --write best.yaml
    """
    file, changes, pictures = run_file or Path(), assignments or [], (html_file, png_directory)
    searching = {"batch_tokens": batch_tokens, "max_nodes": max_nodes, "search_seconds": search_seconds}
    with exit_on_error(traceback):
        _check_one_mode(run_file, world=world, gpus=gpus, calibrate=calibrate)
        _check_requires("gpus", gpus, write=run_out, **searching)
        _check_requires("calibrate", calibrate, ranks=calibrated_ranks)
        if gpus is not None or calibrate is not None:
            _check_requires("world", world, rank=ranks)
        if calibrate is not None:
            from .calibration.calibrate import calibrate_to_file

            join_launcher()
            exit_process(calibrate_to_file(calibrate, base=device, ranks=calibrated_ranks, show_traceback=traceback))
        if gpus is None:
            job = load_job_config(file, changes)
            world = count_ranks(job, world)
            found, parts = _plan(job, world, device, ranks, expert_imbalance, pictures, details=details)
            if not write_json(found, json_file):
                print_parts(parts)
        else:
            options = {**searching, "expert_imbalance": expert_imbalance}
            _search(file, changes, gpus, device, options, (json_file, run_out), pictures, details=details)


def _search(
    file: Path,
    changes: list[str],
    gpus: int,
    device: str | None,
    options: dict[str, Any],
    output_files: OutputFiles,
    plot_files: OutputFiles,
    *,
    details: bool,
) -> None:
    """Search for layouts; print them, and write the results as JSON, and the best as a run file and as plots."""
    from .search.recommend import build_search_summary, build_tables, recommend_layouts, write_run_file

    found = recommend_layouts(file, changes, gpus, device or DEFAULT_DEVICE, **options)
    if not write_json(found, output_files[0]):
        print_parts([*(build_tables(found) if details else []), *build_search_summary(found, details=details)])
    best = found["best"][0]
    if output_files[1] is not None:
        write_run_file(best, output_files[1])
    if any(each is not None for each in plot_files):
        config = load_job_config(file, best["assignments"])
        imbalance, layouts = options["expert_imbalance"], found["layouts"]
        _plan(config, found["world_size"], device, None, imbalance, plot_files, layouts)


def load_job_config(run_file: Path, assignments: list[str]) -> RunConfig:
    """Load a run file, which may leave out the length of the run."""
    from meshwright_run.run_file import RunConfig, read_unbounded_values

    return validate_config(RunConfig, read_unbounded_values(run_file, assignments), where=str(run_file))


def check_job_config(config: RunConfig, world: int) -> None:
    """Check a run on `world` ranks, as far as possible without torch."""
    from meshwright_run.run_file import check_new_model, resolve_layout

    resolve_layout(config, world)
    check_new_model(config.model, config.data.seq_len)


def _check_one_mode(run_file: Path | None, **modes: Any) -> None:
    given = [f"--{name}" for name, value in modes.items() if value is not None]
    if len(given) > 1:
        raise ConfigError(
            f"give one of --world N (plan a run file), --gpus N (find its best layout) or --calibrate FILE (measure "
            f"this machine), not {' and '.join(given)}."
        )
    if run_file is None and given != ["--calibrate"]:
        raise ConfigError(f"give a run file: meshwright plan {' '.join(['run.yaml', *given])} ...")
    if run_file is not None and given == ["--calibrate"]:
        raise ConfigError(f"--calibrate measures a machine and needs no run file. Leave {run_file} out.")


def _check_requires(mode: str, value: Any, **options: Any) -> None:
    for name, given in options.items():
        if given is not None and value is None:
            raise ConfigError(f"--{name.replace('_', '-')} needs --{mode}. Add that, or leave the option out.")


def count_ranks(config: RunConfig, world: int | None) -> int:
    """Return `world`; if it is None, the ranks that a launcher has started, or that `train` would start."""
    if world is not None:
        return world
    if is_launched():
        return int(os.environ["WORLD_SIZE"])
    from meshwright_run.preflight import count_local_ranks

    return count_local_ranks(config)


def _plan(
    config: RunConfig,
    world: int,
    device: str | None,
    ranks: Any,
    imbalance: float,
    plot_files: OutputFiles,
    layouts: Any = (),
    *,
    details: bool = False,
) -> tuple[dict[str, Any], list[Any]]:
    """Plan a run and write its plots; return JSON values, and the parts to print."""
    with gc_paused():
        check_job_config(config, world)  # report common mistakes before the imports that a trace needs
        from .config import load_device_spec
        from .goodput.advice import estimate_failure_cost, render_failure_cost, summarize_failure_cost
        from .model_flops import estimate_mfu
        from .planner import build_job, plan_job
        from .tables import build_summary, build_tables

    on = load_device_spec(device or DEFAULT_DEVICE)
    job = replace(build_job(config, world), expert_imbalance=imbalance)
    draws = any(each is not None for each in plot_files)
    if draws:
        from .plots.plot_data import choose_ranks

        ranks = choose_ranks(job.degrees, ranks)
    found = plan_job(job, on, ranks)
    found["mfu"] = estimate_mfu(job, on, found)
    found["failures"] = failures = estimate_failure_cost(config, job, on, found)
    if draws:
        _write_plots(plot_files, job, on, found, layouts)
    more = {"failures": summarize_failure_cost(failures)}
    if device is None:
        more["device"] = f"{found['device']} (the default; change it with --device)"
    tables = [*build_tables(found), *render_failure_cost(failures, config)] if details else []
    return found, [*tables, build_summary(found, more=more)]


def _write_plots(plot_files: OutputFiles, job: TrainingJob, device: DeviceSpec, plan: Any, layouts: Any) -> None:
    from .plots.plot_data import collect_plot_data

    (page, directory), subject = plot_files, collect_plot_data(job, device, plan, layouts)
    if page is not None:
        from .plots.page import write_page

        write_page(page, subject)
    if directory is not None:
        from .plots.png import write_pngs

        write_pngs(directory, subject)


def print_parts(parts: list[Any]) -> None:
    console = create_output_console(80)
    for part in parts:
        # A command to copy, which has `no_wrap`, stays one line.
        console.print(part, highlight=False, soft_wrap=getattr(part, "no_wrap", None) is True)


def explain(
    run_file: RunFileArgument,
    world: WorldOption = None,
    assignments: SetOption = None,
    traceback: TracebackOption = False,
) -> None:
    """Describe what a run will do: memory per rank, communication per step, checkpoints, outputs. Starts nothing.

    \b
    Examples:
      meshwright explain run.yaml
      meshwright explain run.yaml --world 8 --set tp_size=2
    """
    with exit_on_error(traceback):
        from meshwright_run.run_file import load_run

        config = load_run(run_file, assignments or [])
        if world is not None:
            check_job_config(config, world)
        if os.environ.get("RANK", "0") != "0":
            return
        with gc_paused():
            from .explain.facts import collect_facts
            from .explain.sentences import build_sections

        console = create_console()
        for title, lines in build_sections(collect_facts(config, count_ranks(config, world))).items():
            console.print(title, style="bold", highlight=False)
            for line in lines:
                # In a terminal, the lines of a sentence after the first are indented further.
                wrapped = textwrap.fill(line, max(console.width - 2, 20), subsequent_indent="  ")
                text = wrapped if console.is_terminal else line
                console.print(textwrap.indent(text, "  "), highlight=False, soft_wrap=True)
            console.print()


@hookimpl
def register_commands(app: typer.Typer) -> None:
    for command in (plan, explain):
        app.command()(command)


@hookimpl
def register_run_sections() -> list[RunSection]:
    description = "Predictions for a run before it starts; see docs/reference/plan.md."
    return [RunSection("plan", PlanConfig, description, default=PlanConfig())]


@hookimpl
def monitor_run(config: RunConfig, world_size: int) -> PlanMonitor | None:
    from .live import create_plan_monitor

    return create_plan_monitor(config, world_size)


@hookimpl
def render_plan(config: RunConfig, world_size: int) -> list[Any]:
    from .live import build_plan
    from .tables import build_summary

    plan, has_times = build_plan(config, world_size)
    return [build_summary(plan, has_times=has_times)]

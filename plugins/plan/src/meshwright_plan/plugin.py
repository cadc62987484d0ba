"""Hooks and commands: `meshwright plan` (a run, or its best layout) and `explain` (it in words). Imports no torch."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from meshwright.plugin import (
    Assignments,
    ConfigError,
    RunFile,
    RunSection,
    Traceback,
    hookimpl,
    join,
    leave,
    new_console,
    output_console,
    started_by_launcher,
    told,
    uncollected,
    validated,
)

from .config import PlanConfig

if TYPE_CHECKING:
    from meshwright_run.run_file import RunConfig

    from .comparison import Comparison

DEVICE = "h100-80gb"
Files: TypeAlias = tuple[Path | None, Path | None]


def plan(
    run_file: Annotated[
        Path | None, typer.Argument(help="A run file (YAML). Its data are not read.", show_default=False)
    ] = None,
    world: Annotated[int | None, typer.Option(min=1, help="Number of ranks.")] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="What it runs on: a name, such as h200, or a YAML file of your own; default: h100-80gb. With "
            "--calibrate: the device whose figures stand for what is not measured."
        ),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the plan here.")] = None,
    html_file: Annotated[Path | None, typer.Option("--html", help="Write a page of pictures here.")] = None,
    png_directory: Annotated[Path | None, typer.Option("--png", help="Write the pictures into this directory.")] = None,
    assignments: Assignments = None,
    ranks: Annotated[
        list[int] | None, typer.Option("--rank", help="Trace this rank; default: ranks that stand for all.")
    ] = None,
    expert_imbalance: Annotated[
        float, typer.Option(min=1.0, help="How much more often than on average the busiest experts are chosen.")
    ] = 1.0,
    gpus: Annotated[int | None, typer.Option(help="Find the fastest layouts on so many devices that fit.")] = None,
    batch_tokens: Annotated[
        str | None, typer.Option(help="With --gpus: tokens of a step, such as 4M for 4 * 2**20; default: the file's.")
    ] = None,
    max_nodes: Annotated[int | None, typer.Option(help="With --gpus: use no more nodes.")] = None,
    run_out: Annotated[Path | None, typer.Option("--write", help="With --gpus: write the best as a run file.")] = None,
    calibrate: Annotated[
        Path | None, typer.Option(help="Measure this machine, and write its device file (YAML) here.")
    ] = None,
    calibrated_ranks: Annotated[
        int | None, typer.Option("--ranks", min=1, help="With --calibrate: ranks that compute at the same time.")
    ] = None,
    traceback: Traceback = False,
) -> None:
    """Plan a run: memory, traffic and time of its ranks, by the code that would run, on tensors without memory."""
    file, changes, pictures = run_file or Path(), assignments or [], (html_file, png_directory)
    with told(traceback):
        _check_one_wish(run_file, world=world, gpus=gpus, calibrate=calibrate)
        _check_belonging("gpus", gpus, batch_tokens=batch_tokens, max_nodes=max_nodes, write=run_out)
        _check_belonging("calibrate", calibrate, ranks=calibrated_ranks)
        _check_belonging("world", world, rank=ranks)
        if calibrate is not None:
            from .calibration.calibrate import calibrate_to

            join()
            leave(calibrate_to(calibrate, base=device, ranks=calibrated_ranks, show_traceback=traceback))
        device = device or DEVICE
        if gpus is None:
            _write(_planned(load_job(file, changes), world or 1, device, ranks, expert_imbalance, pictures), json_file)
        else:
            options = {"batch_tokens": batch_tokens, "max_nodes": max_nodes, "expert_imbalance": expert_imbalance}
            _search(file, changes, gpus, device, options, (json_file, run_out), pictures)


def _search(
    file: Path, changes: list[str], gpus: int, device: str, options: dict[str, Any], written: Files, pictures: Files
) -> None:
    """Recommend layouts; write them as JSON, the best as a run file, and pictures of the best."""
    from .search.recommend import recommend, tables, write_run

    found = recommend(file, changes, gpus, device, **options)
    show(tables(found))
    _write(found, written[0])
    best = found["best"][0]
    if written[1] is not None:
        write_run(best, written[1])
    if any(each is not None for each in pictures):
        config = load_job(file, best["assignments"])
        _planned(config, found["world_size"], device, None, options["expert_imbalance"], pictures, found["layouts"])


def load_job(run_file: Path, assignments: list[str]) -> RunConfig:
    """Load a run file, which may leave out how long the run is."""
    from meshwright_run.run_file import RunConfig, read_job

    return validated(RunConfig, read_job(run_file, assignments), where=str(run_file))


def check_job(config: RunConfig, world: int) -> None:
    """Check a run on so many ranks, as far as possible without torch."""
    from meshwright_run.run_file import check_model, layout_of

    layout_of(config, world)
    check_model(config.model, config.data.seq_len)


def _check_one_wish(run_file: Path | None, **wishes: Any) -> None:
    given = [f"--{name}" for name, value in wishes.items() if value is not None]
    if len(given) != 1:
        told_of = " and ".join(given) or "none of them"
        raise ConfigError(
            f"give one of --world N (plan a run file), --gpus N (find its best layout) and --calibrate FILE (measure "
            f"this machine), not {told_of}."
        )
    if (run_file is None) != (given == ["--calibrate"]):
        raise ConfigError(
            f"{given[0]} needs a run file: meshwright plan run.yaml {given[0]} ..."
            if run_file is None
            else f"--calibrate measures a machine, and needs no run file; leave {run_file} out."
        )


def _check_belonging(wish: str, value: Any, **options: Any) -> None:
    for name, given in options.items():
        if given is not None and value is None:
            raise ConfigError(f"--{name.replace('_', '-')} belongs to --{wish}. Leave it out, or give that.")


def _planned(
    config: RunConfig, world: int, device: str, ranks: Any, imbalance: float, pictures: Files, layouts: Any = ()
) -> dict[str, Any]:
    with uncollected():
        check_job(config, world)  # frequent mistakes are found before all that is imported to trace a step
        from .config import find_device
        from .fleet.advice import failures_of
        from .fleet.advice import told as told_of_failures
        from .planned import job_of
        from .planned import plan as planned
        from .report import tables

    on = find_device(device)
    job = replace(job_of(config, world), expert_imbalance=imbalance)
    page, directory = pictures
    draws = page is not None or directory is not None
    if draws:
        from .pictures.shown import shown, to_plan

        ranks = to_plan(job.degrees, ranks)
    found = planned(job, on, ranks)
    show(tables(found))
    failures = failures_of(config, job, on, found)
    show(told_of_failures(failures, config))
    if draws:
        subject = shown(job, on, found, layouts)
        if page is not None:
            from .pictures.page import write_page

            write_page(page, subject)
        if directory is not None:
            from .pictures.pngs import write_pngs

            write_pngs(directory, subject)
    return {**found, "failures": failures}


def _write(found: dict[str, Any], json_file: Path | None) -> None:
    if json_file is not None:
        json_file.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def show(parts: list[Any]) -> None:
    console = output_console(200)
    for part in parts:
        console.print(part, highlight=False)


def explain(
    run_file: RunFile,
    world: Annotated[
        int | None, typer.Option(min=1, help="Ranks, which need not be there; default: as many as `train` would start.")
    ] = None,
    assignments: Assignments = None,
    traceback: Traceback = False,
) -> None:
    """Say in words what a run will do: who holds what, what is sent when, and what comes of it. Starts nothing."""
    with told(traceback):
        from meshwright_run.run_file import load_run

        config = load_run(run_file, assignments or [])
        if world is not None:
            check_job(config, world)
        if os.environ.get("RANK", "0") != "0":
            return
        with uncollected():
            from meshwright_run.preflight import processes

            from .explain.facts import facts_of
            from .explain.words import sections_of

        count = world or (int(os.environ["WORLD_SIZE"]) if started_by_launcher() else processes(config))
        console = new_console()
        for title, lines in sections_of(facts_of(config, count)).items():
            console.print(title, style="bold", markup=False, highlight=False)
            for line in lines:
                console.print(f"  {line}", markup=False, highlight=False, soft_wrap=not console.is_terminal)
            console.print()


@hookimpl
def register_commands(app: typer.Typer) -> None:
    for command in (plan, explain):
        app.command()(command)


@hookimpl
def register_run_sections() -> list[RunSection]:
    description = "What is known of a run before it begins; see docs/plan.md."
    return [RunSection("plan", PlanConfig, description, default=PlanConfig())]


@hookimpl
def monitor_run(config: RunConfig, ranks: int) -> Comparison | None:
    from .comparison import compare

    return compare(config, ranks)


@hookimpl
def show_plan(config: RunConfig, ranks: int) -> list[Any]:
    from .comparison import plan_of
    from .report import tables

    return tables(plan_of(config, ranks))

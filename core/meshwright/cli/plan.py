"""`meshwright plan`: what a run would hold, send and take on ranks that need not be there, and its best layout."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ..base.errors import ConfigError
from ..base.validation import validated
from ..files.terminal import new_console
from ..launch.join import join
from ..launch.rank import leave
from ..plan.asked import laid_out, read_job
from ..train.early import check_model
from ..train.run_file import RunConfig
from .errors import told
from .imports import uncollected

DEVICE = "h100-80gb"

RunFile = Annotated[Path | None, typer.Argument(help="A run file (YAML). Its data are not read.", show_default=False)]
World = Annotated[int | None, typer.Option(min=1, help="Number of ranks.")]
On = Annotated[
    str | None,
    typer.Option(
        help="What it runs on: a name, such as h200, or a YAML file of your own; default: h100-80gb. With --calibrate: "
        "the device whose figures stand for what is not measured."
    ),
]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the plan here.")]
HtmlFile = Annotated[Path | None, typer.Option("--html", help="Write a page of pictures here.")]
Pngs = Annotated[Path | None, typer.Option("--png", help="Write the pictures into this directory.")]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a value, such as tp_size=2 or model.hidden_size=256."),
]
Ranks = Annotated[list[int] | None, typer.Option("--rank", help="Trace this rank; default: ranks that stand for all.")]
Imbalance = Annotated[
    float, typer.Option(min=1.0, help="How much more often than on average the busiest experts are chosen.")
]
Gpus = Annotated[int | None, typer.Option(help="Find the fastest layouts on so many devices that fit.")]
BatchTokens = Annotated[
    str | None, typer.Option(help="With --gpus: tokens of a step, such as 4M for 4 * 2**20; default: the file's.")
]
MaxNodes = Annotated[int | None, typer.Option(help="With --gpus: use no more nodes.")]
RunOut = Annotated[Path | None, typer.Option("--write", help="With --gpus: write the best as a run file.")]
Calibrate = Annotated[Path | None, typer.Option(help="Measure this machine, and write its device file (YAML) here.")]
CalibratedRanks = Annotated[
    int | None, typer.Option("--ranks", min=1, help="With --calibrate: ranks that compute at the same time.")
]
Traceback = Annotated[bool, typer.Option("--traceback", help="Show tracebacks of errors in the input.")]


def plan(
    run_file: RunFile = None,
    world: World = None,
    device: On = None,
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
    png_directory: Pngs = None,
    assignments: Assignments = None,
    ranks: Ranks = None,
    expert_imbalance: Imbalance = 1.0,
    gpus: Gpus = None,
    batch_tokens: BatchTokens = None,
    max_nodes: MaxNodes = None,
    run_out: RunOut = None,
    calibrate: Calibrate = None,
    calibrated_ranks: CalibratedRanks = None,
    traceback: Traceback = False,
) -> None:
    """Plan a run: memory, traffic and time of its ranks, by the code that would run, on tensors without memory."""
    pictures = (html_file, png_directory)
    with told(traceback):
        _check_one_wish(run_file, world=world, gpus=gpus, calibrate=calibrate)
        _check_belonging("gpus", gpus, batch_tokens=batch_tokens, max_nodes=max_nodes, write=run_out)
        _check_belonging("calibrate", calibrate, ranks=calibrated_ranks)
        _check_belonging("world", world, rank=ranks)
        if calibrate is not None:
            from ..plan.calibration.calibrate import calibrate_to

            join()
            leave(calibrate_to(calibrate, base=device, ranks=calibrated_ranks, show_traceback=traceback))
        file = run_file or Path()
        if gpus is not None:
            _recommended(
                file,
                assignments or [],
                gpus,
                device or DEVICE,
                {"batch_tokens": batch_tokens, "max_nodes": max_nodes, "expert_imbalance": expert_imbalance},
                json_file=json_file,
                run_out=run_out,
                pictures=pictures,
            )
        else:
            config = load_job(file, assignments or [])
            found = _planned(config, world or 1, device or DEVICE, ranks, expert_imbalance, pictures)
            _write(found, json_file)


def load_job(run_file: Path, assignments: list[str]) -> RunConfig:
    """A run file, which need not say how long the run is.

    Raises:
        ConfigError: as training does.
    """
    return validated(RunConfig, read_job(run_file, assignments), where=str(run_file))


def check_job(config: RunConfig, world: int) -> None:
    """What can be told of a run on so many ranks without what trains it.

    Raises:
        MeshwrightError: as training does.
    """
    laid_out(config, world)
    check_model(config)


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
    config: RunConfig,
    world: int,
    device: str,
    ranks: list[int] | None,
    expert_imbalance: float,
    pictures: tuple[Path | None, Path | None],
    layouts: tuple[Any, ...] = (),
) -> dict[str, Any]:
    with uncollected():
        # What is often wrong, before all that is imported to trace a step.
        check_job(config, world)
        from ..plan.device import find_device
        from ..plan.fleet.advice import failures_of
        from ..plan.fleet.advice import told as told_of_failures
        from ..plan.job import job_of
        from ..plan.planned import plan as planned
        from ..plan.report import tables

    on = find_device(device)
    job = replace(job_of(config, world), expert_imbalance=expert_imbalance)
    page, directory = pictures
    if page is not None or directory is not None:
        from ..plan.pictures.shown import shown, to_plan

        ranks = to_plan(job.degrees, ranks)
    found = planned(job, on, ranks)
    show(tables(found))
    failures = failures_of(config, job, on, found)
    show(told_of_failures(failures, config))
    if page is not None or directory is not None:
        subject = shown(job, on, found, layouts)
        if page is not None:
            from ..plan.pictures.page import write_page

            write_page(page, subject)
        if directory is not None:
            from ..plan.pictures.pngs import write_pngs

            write_pngs(directory, subject)
    return {**found, "failures": failures}


def _recommended(
    run_file: Path,
    assignments: list[str],
    gpus: int,
    device: str,
    wishes: dict[str, Any],
    *,
    json_file: Path | None,
    run_out: Path | None,
    pictures: tuple[Path | None, Path | None],
) -> None:
    from ..plan.search.recommend import recommend, tables, write_run

    found = recommend(run_file, assignments, gpus, device, **wishes)
    show(tables(found))
    _write(found, json_file)
    best = found["best"][0]
    if run_out is not None:
        write_run(best, run_out)
    if any(each is not None for each in pictures):
        config = load_job(run_file, best["assignments"])
        _planned(
            config, found["world_size"], device, None, wishes["expert_imbalance"], pictures, tuple(found["layouts"])
        )


def _write(found: dict[str, Any], json_file: Path | None) -> None:
    if json_file is not None:
        json_file.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def show(parts: list[Any]) -> None:
    """Print tables."""

    console = new_console()
    if not console.is_terminal:
        console.width = 200  # a file cuts nothing off
    for part in parts:
        console.print(part, highlight=False)

"""`meshwright plan`: memory, traffic and time of a run on ranks that need not be there, and its best layout."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from meshwright.plugin import Assignments, ConfigError, Traceback, output_console, told, uncollected, validated

if TYPE_CHECKING:
    from meshwright_run.run_file import RunConfig

DEVICE = "h100-80gb"


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
            _calibrate(calibrate, device, calibrated_ranks, traceback)
        device = device or DEVICE
        if gpus is None:
            _write(_planned(load_job(file, changes), world or 1, device, ranks, expert_imbalance, pictures), json_file)
        else:
            options = {"batch_tokens": batch_tokens, "max_nodes": max_nodes, "expert_imbalance": expert_imbalance}
            _search(file, changes, gpus, device, options, (json_file, run_out), pictures)


def _calibrate(file: Path, device: str | None, ranks: int | None, show_traceback: bool) -> NoReturn:
    from meshwright.plugin import join, leave

    from .calibration.calibrate import calibrate_to

    join()
    leave(calibrate_to(file, base=device, ranks=ranks, show_traceback=show_traceback))


def _search(
    file: Path,
    changes: list[str],
    gpus: int,
    device: str,
    options: dict[str, Any],
    written: tuple[Path | None, Path | None],
    pictures: tuple[Path | None, Path | None],
) -> None:
    """Recommend layouts; write them as JSON, the best as a run file, and pictures of the best."""
    from .search.recommend import recommend, tables, write_run

    json_file, run_out = written
    found = recommend(file, changes, gpus, device, **options)
    show(tables(found))
    _write(found, json_file)
    best = found["best"][0]
    if run_out is not None:
        write_run(best, run_out)
    if any(each is not None for each in pictures):
        config, size, layouts = load_job(file, best["assignments"]), found["world_size"], tuple(found["layouts"])
        _planned(config, size, device, None, options["expert_imbalance"], pictures, layouts)


def load_job(run_file: Path, assignments: list[str]) -> RunConfig:
    """Load a run file, which may leave out how long the run is.

    Raises:
        ConfigError: as training does.
    """
    from meshwright_run.layout import read_job
    from meshwright_run.run_file import RunConfig

    return validated(RunConfig, read_job(run_file, assignments), where=str(run_file))


def check_job(config: RunConfig, world: int) -> None:
    """Check a run on so many ranks, as far as possible without torch.

    Raises:
        MeshwrightError: as training does.
    """
    from meshwright_run.layout import layout_of
    from meshwright_run.run_file import check_model

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
    config: RunConfig,
    world: int,
    device: str,
    ranks: list[int] | None,
    expert_imbalance: float,
    pictures: tuple[Path | None, Path | None],
    layouts: tuple[Any, ...] = (),
) -> dict[str, Any]:
    with uncollected():
        # Frequent mistakes are found before all that is imported to trace a step.
        check_job(config, world)
        from .device import find_device
        from .fleet.advice import failures_of
        from .fleet.advice import told as told_of_failures
        from .job import job_of
        from .planned import plan as planned
        from .report import tables

    on = find_device(device)
    job = replace(job_of(config, world), expert_imbalance=expert_imbalance)
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
    """Print tables."""
    console = output_console(200)
    for part in parts:
        console.print(part, highlight=False)

"""`meshwright plan`: what a run would hold, send and take on ranks that need not be there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ..base.validation import validated
from ..data.rows.order import check_batch_size
from ..model.model_types import check_model_type
from ..strategy.stack import resolve
from ..train.run_file import RunConfig, read_values
from .errors import told

DEVICE = "h100-80gb"
NO_END = 2**31 - 1
"""Steps of a run that does not say how many."""


def plan(
    run_file: Annotated[Path, typer.Argument(help="A run file (YAML). Its data are not read.")],
    world: Annotated[int, typer.Option(min=1, help="Number of ranks.")],
    device: Annotated[
        str, typer.Option(help="What it runs on: a name, such as h100-80gb, or a YAML file of your own.")
    ] = DEVICE,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the plan here.")] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a value, such as tp_size=2 or model.hidden_size=256."),
    ] = None,
    ranks: Annotated[
        list[int] | None, typer.Option("--rank", help="Trace this rank; default: ranks that stand for all.")
    ] = None,
    expert_imbalance: Annotated[
        float, typer.Option(min=1.0, help="How much more often than on average the busiest experts are chosen.")
    ] = 1.0,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show tracebacks of errors in the input.")] = False,
) -> None:
    """Plan a run: memory, traffic and time of its ranks, by the code that would run, on tensors without memory."""
    with told(traceback):
        config = load_job(run_file, assignments or [])
        # What is often wrong, before all that is imported to trace a step.
        check_job(config, world)
        from rich.console import Console

        from ..plan.device import find_device
        from ..plan.job import job_of
        from ..plan.planned import plan as planned
        from ..plan.report import tables

        on = find_device(device)
        found = planned(replace(job_of(config, world), expert_imbalance=expert_imbalance), on, ranks)
        if json_file is not None:
            json_file.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        console = Console()
        if not console.is_terminal:
            console.width = 200  # a file cuts nothing off
        for table in tables(found):
            console.print(table)


def load_job(run_file: Path, assignments: list[str]) -> RunConfig:
    """A run file, which need not say how long the run is.

    Raises:
        ConfigError: as training does.
    """
    values = read_values(run_file, assignments)
    if values.get("steps") is None and values.get("epochs") is None:
        values["steps"] = NO_END
    return validated(RunConfig, values, where=str(run_file))


def check_job(config: RunConfig, world: int) -> None:
    """What can be told of a run on so many ranks without torch.

    Raises:
        MeshwrightError: as training does.
    """
    _, degrees = resolve(
        config.strategy, config, world, config=config.strategy_config, wrapper_config=config.wrapper_config
    )
    rows = config.micro_batch_size or max(1, config.batch_size // degrees.dp)
    check_batch_size(config.batch_size, data_size=degrees.dp, micro_batch_size=rows)
    if "model_type" in config.model:
        check_model_type(str(config.model["model_type"]))

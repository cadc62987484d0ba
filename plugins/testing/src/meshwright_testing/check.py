"""`meshwright check`: the conformance suite on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshwright.plugin import MeshSizes, Traceback, new_console, output_console, told


def check(
    strategy: Annotated[str, typer.Argument(help="Name or alias of an installed strategy.")],
    ranks: Annotated[int, typer.Option(help="World size of the larger layouts.")] = 4,
    models: Annotated[
        str | None,
        typer.Option(help="Model types to train instead, comma-separated, or all: every causal LM of transformers."),
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="OPTION=VALUE", help="An option of the strategy, or a size of the mesh."),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda; several ranks may share a GPU.")] = "cpu",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results here, as they come.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Leave out what the JSON file holds already.")] = False,
    traceback: Traceback = False,
) -> None:
    """Prove a strategy: train what it claims on real ranks and compare with `single`, in float64."""
    with told(traceback):
        from meshwright.plugin import as_options

        from .check_report import as_table, reasons, run_cells, summary
        from .models import known_models
        from .suite import conformance

        chosen = None if models is None else known_models(models)
        options = as_options(assignments or [])
        sizes = {name: options.pop(name) for name in MeshSizes.model_fields if name in options}
        cells = conformance(strategy, ranks=ranks, config=options, models=chosen, device=device, sizes=sizes)
        console = output_console(160)
        results = run_cells(cells, json_file=json_file, resume=resume, console=new_console(stderr=True))
        console.print(as_table(results))
        for line in reasons(results):
            console.print(f"\n{line}", markup=False, highlight=False, soft_wrap=True)
        console.print(f"\n{summary(results)}", highlight=False)
    raise typer.Exit(1 if any(result.status == "failed" for result in results) else 0)

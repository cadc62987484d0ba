"""`meshwright check`: the conformance suite on the command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.plugin import (
    MeshSizes,
    TracebackOption,
    create_console,
    create_output_console,
    exit_on_error,
    write_json,
)

if TYPE_CHECKING:
    from .cells import Result


def check(
    strategy: Annotated[str, typer.Argument(help="Name or alias of an installed strategy.")],
    ranks: Annotated[int, typer.Option(help="World size of the largest layouts.")] = 4,
    models: Annotated[
        str | None,
        typer.Option(help="Model types to train, comma-separated; all: every causal LM of transformers."),
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="OPTION=VALUE", help="Set an option of the strategy or a mesh size, such as tp_size=2."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda. Several ranks can share one GPU.")] = "cpu",
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write results to this JSON file as they arrive; -: print them."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Skip cells whose results are already in the JSON file.")
    ] = False,
    traceback: TracebackOption = False,
) -> None:
    """Test a strategy: train every layout that it supports on real ranks and compare with `single`, in float64.

    \b
    Examples:
      meshwright check fsdp2
      meshwright check fsdp2 --ranks 2 --models qwen3_moe,mamba2
    """
    with exit_on_error(traceback):
        from meshwright.plugin import parse_assignments

        from .check_report import (
            build_report,
            format_reasons,
            format_summary,
            render_table,
            result_to_dict,
            run_cells,
        )
        from .models import parse_model_types
        from .suite import conformance

        chosen = None if models is None else parse_model_types(models)
        options = parse_assignments(assignments or [])
        sizes = {name: options.pop(name) for name in MeshSizes.model_fields if name in options}
        cells = conformance(strategy, ranks=ranks, config=options, models=chosen, device=device, sizes=sizes)
        console = create_output_console(160)
        file = None if json_file == Path("-") else json_file
        results = run_cells(cells, json_file=file, resume=resume, console=create_console(stderr=True))
        if json_file == Path("-"):
            write_json(build_report({str(each.cell): result_to_dict(each) for each in results}), json_file)
            raise typer.Exit(_find_exit_code(results))
        console.print(render_table(results))
        for line in format_reasons(results):
            console.print(f"\n{line}", markup=False, highlight=False, soft_wrap=True)
        console.print(f"\n{format_summary(results)}", highlight=False)
    raise typer.Exit(_find_exit_code(results))


def _find_exit_code(results: Sequence[Result]) -> int:
    return 1 if any(result.status == "failed" for result in results) else 0

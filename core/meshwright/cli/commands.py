"""The command line. Plugins add subcommands through the hook `register_commands`."""

from __future__ import annotations

import json
import os
import sys
import traceback as tracebacks
from pathlib import Path
from textwrap import indent, wrap
from typing import Annotated

import typer

from ..base.errors import MeshwrightError
from ..launch.rank import leave, started_by_launcher
from ..launch.slurm import join_step
from ..mesh.sizes import CLAIMABLE_AXES, MeshSizes
from ..strategy.registry import Registry, get_registry
from ..strategy.spec import StrategySpec
from ..train.run_file import load_run, run_schema

app = typer.Typer(
    name="meshwright",
    help="Train any Hugging Face causal LM under any parallelism strategy, chosen by name, with one loop.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def train(
    run_file: Annotated[Path, typer.Argument(help="A run file (YAML).")],
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a value, such as tp_size=2 or model.hidden_size=256."),
    ] = None,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show tracebacks of errors in the input.")] = False,
) -> None:
    """Train a model. Starts the ranks of this node itself, or joins those that torchrun or srun started."""
    with _told(traceback):
        join_step()
        config = load_run(run_file, assignments or [])
        if not started_by_launcher() and config.processes(get_registry().get(config.strategy).axes, 0) > 1:
            # The fork server imports torch and transformers while this process does, too.
            from ..launch.local import warm_up

            warm_up(["meshwright.train.run"])
        from ..train.run import start

        code = start(config, show_traceback=traceback)
    leave(code)


@app.command()
def strategies() -> None:
    """List the strategies: installed, broken (with the reason), and installable."""
    sys.stdout.write(described(get_registry()))


@app.command()
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
    traceback: Annotated[bool, typer.Option("--traceback", help="Show tracebacks of errors in the input.")] = False,
) -> None:
    """Prove a strategy: train what it claims on real ranks and compare with `single`, in float64."""
    with _told(traceback):
        from rich.console import Console

        from ..testing.conformance import conformance
        from ..testing.models import known_models
        from ..train.run_file import as_options
        from .check import as_table, run_cells, summary, told

        chosen = None if models is None else known_models(models)
        options = as_options(assignments or [])
        sizes = {name: options.pop(name) for name in MeshSizes.model_fields if name in options}
        cells = conformance(strategy, ranks=ranks, config=options, models=chosen, device=device, sizes=sizes)
        console = Console()
        if not console.is_terminal:
            console.width = 160  # a file cuts nothing off
        results = run_cells(cells, json_file=json_file, resume=resume, console=Console(stderr=True))
        console.print(as_table(results))
        for line in told(results):
            console.print(f"\n{line}", markup=False, highlight=False, soft_wrap=True)
        console.print(f"\n{summary(results)}", highlight=False)
    raise typer.Exit(1 if any(result.status == "failed" for result in results) else 0)


checkpoints = typer.Typer(help="Look at checkpoints.", no_args_is_help=True)
app.add_typer(checkpoints, name="checkpoint")


@checkpoints.command()
def show(
    directory: Annotated[Path, typer.Argument(help="A checkpoint, or a directory of checkpoints.")],
) -> None:
    """Tell what is in a checkpoint, and whether it is whole; exits with 1 where one is not."""
    with _told(traceback=False):
        from rich.console import Console

        from ..checkpoint.show import shown

        table, all_whole = shown(directory)
        console = Console()
        if not console.is_terminal:
            console.width = 160  # a file cuts nothing off
        console.print(table)
    raise typer.Exit(0 if all_whole else 1)


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="The checkpoint.")],
    output: Annotated[Path, typer.Argument(help="The Hugging Face directory to write: new, or empty.")],
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 ... for the weights; as they were saved otherwise.")
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="Of a file, such as 5GB; memory is bounded by it.")] = "5GB",
) -> None:
    """Write the model of a checkpoint as a Hugging Face directory, with one process and no network."""
    with _told(traceback=False):
        from ..base.class_paths import dtype as dtype_of
        from ..checkpoint.export import export_checkpoint

        chosen = None if dtype is None else dtype_of(dtype)
        export_checkpoint(checkpoint, output, dtype=chosen, max_shard_size=max_shard_size)
    sys.stdout.write(f"written {output}\n")


@app.command()
def schema() -> None:
    """Print the JSON schema of the run file, with the options of the installed strategies, for editors."""
    sys.stdout.write(json.dumps(run_schema(), indent=2) + "\n")


def described(registry: Registry) -> str:
    """What `meshwright strategies` prints: a block for each strategy, wrapped at 80 columns."""
    blocks = [_block(spec, registry.owner(name)) for name, spec in registry.strategies.items()]
    for title, lines in (
        ("broken", [str(failure) for failure in registry.failures]),
        ("installable, from a clone of meshwright", [f"{n}: {line}" for n, line in registry.installable.items()]),
    ):
        if lines:
            # Not wrapped: reasons and commands are to be copied whole.
            blocks.append("\n".join([f"{title}:", *(indent(line, "  ") for line in lines)]))
    return "\n\n".join(blocks) + "\n"


def _block(spec: StrategySpec, owner: str) -> str:
    rows = {
        "aliases": ", ".join(spec.aliases),
        "shards": ", ".join(axis for axis in CLAIMABLE_AXES if axis in spec.axes) or "nothing",
        "wraps": "another strategy" if spec.wraps else "",
        "plugin": owner,
    }
    told = [f"{label}: {text}" for label, text in rows.items() if text]
    lines = [line for text in (spec.summary, *told) for line in wrap(text, 76, break_long_words=False)]
    return "\n".join([spec.name, *(f"    {line}" for line in lines)])


class _told:
    """Show an error of the user's making as one message, once for all ranks of a node, and exit with its code."""

    def __init__(self, traceback: bool) -> None:
        self._traceback = traceback

    def __enter__(self) -> None:
        return None

    def __exit__(self, error_type: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, MeshwrightError):
            # Each node has its own files, so each tells what is wrong with them.
            if os.environ.get("LOCAL_RANK", "0") == "0":
                frames = "".join(tracebacks.format_exception(error)[:-1]) if self._traceback else ""
                sys.stderr.write(f"{frames}error: {error}\n")
            raise SystemExit(error.exit_code) from None


def main() -> None:
    """Entry point of the command `meshwright`."""
    get_registry().extend_commands(app)
    # For the commands of plugins.
    with _told(traceback=False):
        app()

"""The command line. Plugins add subcommands through the hook `register_commands`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from .errors import MeshwrightError
from .rank import leave, started_by_launcher
from .registry import get_registry
from .runfile import load_run, run_schema

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
    """Train a model. Starts the ranks of this node itself, or joins those that torchrun started."""
    with _told(traceback):
        config = load_run(run_file, assignments or [])
        if not started_by_launcher() and config.processes(get_registry().get(config.strategy).axes, 0) > 1:
            # The fork server imports torch and transformers while this process does, too.
            from .launch import warm_up

            warm_up(["meshwright.run"])
        from .run import start

        code = start(config, show_traceback=traceback)
    leave(code)


@app.command()
def strategies() -> None:
    """List the strategies: installed, broken (with the reason), and installable."""
    registry, console = get_registry(), Console()
    table = Table("strategy", "shards", "summary", "aliases", "plugin", box=None, pad_edge=False)
    for name, spec in registry.strategies.items():
        axes = ", ".join(sorted(spec.axes)) or "-"
        table.add_row(name, axes, spec.summary, ", ".join(spec.aliases) or "-", registry.owner(name))
    console.print(table)
    for title, lines in (
        ("broken", [str(failure) for failure in registry.failures]),
        ("installable, from a clone of meshwright", [f"{n}: {line}" for n, line in registry.installable.items()]),
    ):
        if lines:
            console.print(f"\n{title}")
            for line in lines:
                console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)


@app.command()
def schema() -> None:
    """Print the JSON schema of the run file, with the options of the installed strategies, for editors."""
    sys.stdout.write(json.dumps(run_schema(), indent=2) + "\n")


class _told:
    """Show an error of the user's making as one message, once for all ranks, and exit with its code."""

    def __init__(self, traceback: bool) -> None:
        self._traceback = traceback

    def __enter__(self) -> None:
        return None

    def __exit__(self, error_type: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, MeshwrightError) and not self._traceback:
            if os.environ.get("RANK", "0") == "0":
                sys.stderr.write(f"error: {error}\n")
            raise SystemExit(error.exit_code) from None


def main() -> None:
    """Entry point of the command `meshwright`."""
    get_registry().extend_commands(app)
    app()

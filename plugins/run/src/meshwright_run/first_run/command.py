"""`meshwright init`: a first run file, from five questions or from flags."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from meshwright.plugin import Traceback, get_registry, new_console, say, told


def init(
    file: Annotated[Path, typer.Argument(help="The run file to write.")] = Path("run.yaml"),
    model: Annotated[
        str | None, typer.Option(help="A model directory, a hub id, or new: a small one with new weights (default).")
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(help="A glob of files, which may be given several times; default: stdlib, Python's own sources."),
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(help="What files hold: text, messages or prompt_completion; default: what the first line shows."),
    ] = None,
    adapter: Annotated[
        bool | None, typer.Option("--adapter/--full", help="Train an adapter (LoRA), or the whole model (default).")
    ] = None,
    devices: Annotated[int | None, typer.Option(min=1, help="Ranks on this machine; default: what is found.")] = None,
    strategy: Annotated[str | None, typer.Option(help="Default: what is recommended for so many.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps; default: 300.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Times that each row is trained on; in place of steps.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing: defaults where no flag says more.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if there is one.")] = False,
    traceback: Traceback = False,
) -> None:
    """Write a first run file, with a comment on each part. Asks five questions; flags answer them, too."""
    with told(traceback):
        from .answers import find_machine, known_of
        from .questions import Wishes, answered
        from .write import check_place, write_run_file

        check_place(file, overwrite=overwrite)
        asks = not yes and sys.stdin.isatty() and sys.stdout.isatty()
        wishes = Wishes(model, tuple(data) if data else None, format, adapter, devices, strategy, steps, epochs)
        answers = answered(wishes, find_machine, get_registry(), new_console() if asks else None)
        write_run_file(file, answers, known_of(answers.model), find_machine(), overwrite=overwrite)
        name = shlex.quote(str(file))
        say(
            f"written {file}: {answers.strategy} on {answers.ranks} rank{'s' if answers.ranks > 1 else ''}\n"
            f"  meshwright explain {name}    # what it will do, in words\n"
            f"  meshwright train {name}      # do it\n"
        )

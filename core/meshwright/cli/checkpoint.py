"""`meshwright checkpoint`: what is in checkpoints, and whether they are whole."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .errors import told


def show(
    directory: Annotated[Path, typer.Argument(help="A checkpoint, or a directory of checkpoints.")],
) -> None:
    """Tell what is in a checkpoint, and whether it is whole; exits with 1 where one is not."""
    with told(traceback=False):
        from rich.console import Console

        from ..checkpoint.show import shown

        table, all_whole = shown(directory)
        console = Console()
        if not console.is_terminal:
            console.width = 10_000  # a file cuts nothing off
        console.print(table)
    raise typer.Exit(0 if all_whole else 1)

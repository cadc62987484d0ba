"""Options of `meshwright` itself, before any subcommand."""

from __future__ import annotations

from typing import Annotated

import typer

from ..base.version import __version__
from ..files.terminal import say


def _tell_version(wanted: bool) -> None:
    if wanted:
        say(f"meshwright {__version__}\n")
        raise typer.Exit


def about(
    version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train any Hugging Face causal LM under any parallelism strategy, chosen by name, with one loop."""

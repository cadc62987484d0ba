"""What commands share: options, how they show errors and results, and how they import large packages."""

from __future__ import annotations

import gc
import json
import os
import traceback as tracebacks
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ..base.errors import ConfigError, MeshwrightError, said
from .terminal import new_console, say

Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a value, such as tp_size=2 or model.hidden_size=256."),
]
"""Option `--set` of a command: changes of the run file."""
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write all of it here.")]
"""Option `--json` of a command: a file for the results."""
RunFile = Annotated[Path, typer.Argument(help="A run file (YAML).")]
"""Argument of a command: a run file."""
Traceback = Annotated[bool, typer.Option("--traceback", help="Show tracebacks of errors in the input.")]
"""Option `--traceback` of a command."""


@contextmanager
def told(traceback: bool, *, everywhere: bool = False) -> Iterator[None]:
    """Show an error of the user's making as one message, with its traceback if asked for, and exit with its code.

    `everywhere` shows it on each rank, since the others may have none, or another; otherwise it is shown once on each
    node, since each has its own files.
    """
    try:
        yield
    except MeshwrightError as error:
        if everywhere or os.environ.get("LOCAL_RANK", "0") == "0":
            frames = "".join(tracebacks.format_exception(error)[:-1]) if traceback else ""
            say(f"{frames}{said(error)}\n", stderr=True)
        raise SystemExit(error.exit_code) from None


@contextmanager
def uncollected() -> Iterator[None]:
    """Import large packages faster: collect no garbage meanwhile, and never look through what is there at the end."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()


def output_console(width: int = 10_000) -> Console:
    """Return a console for results, with room for `width` characters where the output is a file."""
    console = new_console()
    if not console.is_terminal:
        console.width = width
    return console


def tell(what: Any, values: dict[str, Any], json_file: Path | None) -> None:
    """Print `what` for people, and write the values for machines if there is a file for them. Raises ConfigError."""
    output_console().print(what, highlight=False)
    if json_file is not None:
        write(json_file, json.dumps(values, indent=1) + "\n")


def write(path: Path, text: str) -> None:
    """Write a file; raise ConfigError where it cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}. Name another file.") from None

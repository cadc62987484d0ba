"""Helpers of commands: common options, output of errors and results, and faster imports."""

from __future__ import annotations

import gc
import json
import os
import traceback as tracebacks
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ..base.errors import ConfigError, MeshwrightError, format_error
from .terminal import create_console, echo

SETTING_COMPLETERS: list[Callable[[str], Sequence[str]]] = []
"""Functions of plugins that complete the value of `--set` in shells."""


def _complete_setting(incomplete: str) -> list[str]:
    return [each for complete in SETTING_COMPLETERS for each in complete(incomplete)]


SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a value, such as tp_size=2 or model.hidden_size=256.",
        autocompletion=_complete_setting,
    ),
]
"""Option `--set` of a command: changes to the run file."""
JsonOption = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Write the full result to this JSON file; -: print only it."),
]
"""Option `--json` of a command: output file for the results, or - for standard output."""
RunFileArgument = Annotated[Path, typer.Argument(help="A run file (YAML).")]
"""Argument of a command: a run file."""
TracebackOption = Annotated[bool, typer.Option("--traceback", help="Show tracebacks of errors in the input.")]
"""Option `--traceback` of a command."""


@contextmanager
def exit_on_error(show_traceback: bool, *, on_all_ranks: bool = False) -> Iterator[None]:
    """Print a MeshwrightError as a message, and exit with its exit code.

    Args:
        show_traceback: also print the traceback.
        on_all_ranks: print on each rank, since other ranks may have no error or another one. Otherwise print once on
            each node, since each node has its own files.
    """
    try:
        yield
    except MeshwrightError as error:
        if on_all_ranks or os.environ.get("LOCAL_RANK", "0") == "0":
            frames = "".join(tracebacks.format_exception(error)[:-1]) if show_traceback else ""
            echo(f"{frames}{format_error(error)}\n", stderr=True)
        raise SystemExit(error.exit_code) from None


@contextmanager
def gc_paused() -> Iterator[None]:
    """Context in which large packages are imported faster: pauses garbage collection, and calls `gc.freeze` on exit."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def create_output_console(width: int = 10_000) -> Console:
    """Return a console for results, `width` characters wide if the output is not a terminal."""
    console = create_console()
    if not console.is_terminal:
        console.width = width
    return console


def report_results(renderable: Any, values: Any, json_file: Path | None) -> None:
    """Print `renderable`, and write `values` as JSON to `json_file` if it is set. Raises ConfigError."""
    if not write_json(values, json_file):
        create_output_console().print(renderable, highlight=False)


def write_json(values: Any, json_file: Path | None) -> bool:
    """Write `values` as JSON to the file of option `--json`, if set. Return whether that is standard output, so that
    the command prints nothing else. Raises ConfigError."""
    is_stdout = json_file == Path("-")
    if json_file is not None:
        text = json.dumps(values, indent=1) + "\n"
        if is_stdout:
            echo(text)
        else:
            write_output_file(json_file, text)
    return is_stdout


def write_output_file(path: Path, text: str) -> None:
    """Write a text file; ConfigError if that fails."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}. Name another file.") from None

"""How commands tell what they have found: to people, and into a file for machines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ..base.errors import ConfigError
from ..files.terminal import new_console

JsonFile = Annotated[Path | None, typer.Option("--json", help="Write all of it here.")]


def tell(what: Any, values: dict[str, Any], json_file: Path | None) -> None:
    """Print what is for people, and write what is for machines, if there is a file for it.

    Raises:
        ConfigError: the file cannot be written.
    """

    console = new_console()
    if not console.is_terminal:
        console.width = 10_000  # a file cuts nothing off
    console.print(what, highlight=False)
    if json_file is not None:
        write(json_file, json.dumps(values, indent=1) + "\n")


def write(path: Path, text: str) -> None:
    """Raises ConfigError where it cannot."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}. Name another file.") from None

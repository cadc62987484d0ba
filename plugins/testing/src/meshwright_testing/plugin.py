"""Hooks of meshwright-testing. Imports no torch."""

from __future__ import annotations

import typer

from meshwright.plugin import hookimpl

from .check import check


@hookimpl
def register_commands(app: typer.Typer) -> None:
    app.command()(check)

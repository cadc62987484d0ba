"""Implement the hooks of this plugin. No torch in this module."""

from __future__ import annotations

import typer

from meshwright.plugin import hookimpl

from .command import watch


@hookimpl
def register_commands(app: typer.Typer) -> None:
    app.command()(watch)

"""Implement the hooks of this plugin. No torch in this module."""

from __future__ import annotations

import typer

from meshwright.plugin import hookimpl

from .check import check


@hookimpl
def register_commands(app: typer.Typer) -> None:
    app.command()(check)

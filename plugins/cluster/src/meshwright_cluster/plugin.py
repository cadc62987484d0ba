"""Implement the hooks of this plugin. No torch in this module."""

from __future__ import annotations

import typer

from meshwright.plugin import RunSection, hookimpl

from .command import launch
from .config import LaunchConfig, without_secrets


@hookimpl
def register_commands(app: typer.Typer) -> None:
    app.command()(launch)


@hookimpl
def register_run_sections() -> list[RunSection]:
    description = "What `meshwright launch` tells a cluster."
    return [RunSection("launch", LaunchConfig, description, without_secrets=without_secrets)]

"""Core's own commands, each in a module of its own."""

from __future__ import annotations

import typer

from ..strategy.hooks import hookimpl
from . import data
from .check import check
from .checkpoint import export, show, verify
from .listing import schema, strategies
from .train import train


@hookimpl
def register_commands(app: typer.Typer) -> None:
    for command in (train, strategies, check, export, schema):
        app.command()(command)
    checkpoints = typer.Typer(help="Look at checkpoints.", no_args_is_help=True)
    checkpoints.command()(show)
    checkpoints.command()(verify)
    app.add_typer(checkpoints, name="checkpoint")
    data_commands = typer.Typer(help="Look at the data of a run.", no_args_is_help=True)
    data_commands.command()(data.show)
    app.add_typer(data_commands, name="data")

"""Hook implementations of this plugin. Imports no torch."""

from __future__ import annotations

import typer

from meshwright.plugin import SETTING_COMPLETERS, hookimpl

from .commands import init, schema, show_checkpoint, show_data, train, verify_checkpoint
from .completion import complete_setting
from .model_commands import chat, evaluate, export


@hookimpl
def register_commands(app: typer.Typer) -> None:
    for command in (train, chat, export, schema, init):
        app.command()(command)
    app.command("eval")(evaluate)
    if complete_setting not in SETTING_COMPLETERS:
        SETTING_COMPLETERS.append(complete_setting)
    checkpoints = typer.Typer(help="Inspect checkpoints.", no_args_is_help=True)
    checkpoints.command("show")(show_checkpoint)
    checkpoints.command("verify")(verify_checkpoint)
    app.add_typer(checkpoints, name="checkpoint")
    data_commands = typer.Typer(help="Inspect the data of a run.", no_args_is_help=True)
    data_commands.command("show")(show_data)
    app.add_typer(data_commands, name="data")

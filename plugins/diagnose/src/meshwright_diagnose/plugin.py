"""Implement the hooks of this plugin. No torch in this module."""

from __future__ import annotations

import typer

from meshwright.plugin import hookimpl

from .doctor.command import doctor
from .profile_command import compare, show
from .replay.command import diff, replay


@hookimpl
def register_commands(app: typer.Typer) -> None:
    for command in (replay, diff, doctor):
        app.command()(command)
    profiles = typer.Typer(help="Look at profiles of steps.", no_args_is_help=True)
    profiles.command()(show)
    profiles.command()(compare)
    app.add_typer(profiles, name="profile")

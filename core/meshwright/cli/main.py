"""The command `meshwright`: core's subcommands, each in a file of its own, and those of plugins.

Importing it imports no torch, so that listing and errors in a run file take no time.
"""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from io import TextIOWrapper
from typing import Any

import typer
from typer.main import get_group

from ..base.errors import ConfigError
from ..files.terminal import escape_messages, say
from ..files.versions import check_torch
from ..launch.allocator import prefer_expandable_segments
from ..launch.rank import leave
from ..launch.safe_path import protect_children
from ..strategy.registry import Failure, Registry, get_registry
from . import data, profile
from .about import about
from .check import check
from .checkpoint import show, verify
from .diff import diff
from .doctor import doctor
from .errors import told
from .explain import explain
from .export import export
from .init import init
from .launch import launch
from .plan import plan
from .replay import replay
from .schema import schema
from .strategies import strategies
from .train import train
from .watch import watch

_OUTPUT_FAILS = (errno.ENOSPC, errno.EPIPE, errno.EIO, errno.EBADF)

app = typer.Typer(
    name="meshwright",
    help="Train any Hugging Face causal LM under any parallelism strategy, chosen by name, with one loop.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    callback=about,
)
checkpoints = typer.Typer(help="Look at checkpoints.", no_args_is_help=True)
checkpoints.command()(show)
checkpoints.command()(verify)
data_commands = typer.Typer(help="Look at the data of a run.", no_args_is_help=True)
data_commands.command()(data.show)
profiles = typer.Typer(help="Look at profiles of steps.", no_args_is_help=True)
profiles.command()(profile.show)
profiles.command()(profile.compare)
app.command()(train)
app.command()(launch)
app.command()(plan)
app.command()(strategies)
app.command()(check)
app.add_typer(checkpoints, name="checkpoint")
app.add_typer(data_commands, name="data")
app.add_typer(profiles, name="profile")
app.command()(export)
app.command()(schema)
app.command()(watch)
app.command()(replay)
app.command()(diff)
app.command()(init)
app.command()(explain)
app.command()(doctor)


def main() -> None:
    """Entry point of the command `meshwright`."""
    protect_children()
    escape_messages()
    prefer_expandable_segments()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # What its encoding lacks is no reason to fail.
            with suppress(OSError):
                stream.reconfigure(errors="backslashreplace")
    code = 0
    try:
        # For the commands of plugins, too.
        with told(traceback=False):
            _check_place()
            add_commands(app, get_registry())
            check_torch()
            app()
    except SystemExit as end:
        if not isinstance(end.code, int):
            raise
        code = end.code
    except OSError as error:
        if error.filename is not None or error.errno not in _OUTPUT_FAILS:
            raise
        code = _output_failed(error)
    # An interpreter that takes down torch piece by piece needs as long for it as for importing it.
    try:
        sys.stdout.flush()
    except OSError as error:
        os._exit(_output_failed(error))
    leave(code)


def _check_place() -> None:
    """Raise ConfigError where the current directory has been removed."""
    try:
        os.getcwd()
    except OSError as error:
        raise ConfigError(
            f"the current directory is not there any more ({error.strerror}). Go to another one, by cd."
        ) from None


def _output_failed(error: OSError) -> int:
    """Say so where that can be said; the exit code."""
    with suppress(OSError):
        say(f"error: the output cannot be written: {error.strerror}.\n", stderr=True)
    return 1


def add_commands(app: typer.Typer, registry: Registry) -> None:
    """Let each plugin add its subcommands, by the hook `register_commands`.

    A plugin that fails, or whose command would hide another, adds none and is told in the registry's `failures`.
    """
    for name, register in registry.implementations("register_commands"):
        own = typer.Typer()
        reason = _defect(own, register, app)
        if reason is None:
            app.add_typer(own)
        else:
            registry.set_aside(Failure(name, reason))


def _defect(own: typer.Typer, register: Any, app: typer.Typer) -> str | None:
    """Let a plugin register its commands in `own`; why they cannot be added, if they cannot."""
    try:
        register(app=own)
        taken = set(get_group(own).commands) & set(get_group(app).commands)
    except (Exception, SystemExit) as error:
        # Whatever a plugin raises; see [Note: isolation] in the registry.
        return f"register_commands raised {type(error).__name__}: {error}"
    return f"its commands exist already: {', '.join(sorted(taken))}" if taken else None

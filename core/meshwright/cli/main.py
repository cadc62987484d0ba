"""The command `meshwright`, whose subcommands plugins add by the hook `register_commands`.

No command's implementation is imported before the command runs, and so no torch.
"""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from functools import cache
from io import TextIOWrapper
from textwrap import indent, wrap
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_group

from ..base.errors import ConfigError
from ..base.lazy import how_to_install
from ..base.processes import leave, prefer_expandable_segments
from ..base.safe_path import protect_children
from ..base.version import __version__
from ..files.commands import told
from ..files.terminal import escape_messages, say
from ..files.versions import check_torch
from ..mesh.sizes import CLAIMABLE_AXES
from ..strategy.contract import StrategySpec
from ..strategy.registry import Failure, Registry, get_registry

_OUTPUT_FAILS = (errno.ENOSPC, errno.EPIPE, errno.EIO, errno.EBADF)
COMMANDS_OF = {
    "run": "train export schema init checkpoint data",
    "plan": "plan explain",
    "cluster": "launch",
    "watch": "watch",
    "diagnose": "replay diff doctor profile",
    "testing": "check",
}
"""Commands of plugins of this project, by the extra that installs each."""
ORDER = "train launch plan strategies check export schema watch replay diff init explain doctor checkpoint data profile"
"""The subcommands in the order of the help; those of other plugins follow."""


class _Commands(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        order = ORDER.split()
        return sorted(super().list_commands(ctx), key=lambda name: order.index(name) if name in order else len(order))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and self.get_command(ctx, args[0]) is None:
            for extra, names in COMMANDS_OF.items():
                if args[0] in names.split():
                    raise ConfigError(
                        f"{args[0]}: this command is of a plugin that is not installed. {how_to_install(extra)}"
                    )
        return super().resolve_command(ctx, args)


def _print_version(wanted: bool) -> None:
    if wanted:
        say(f"meshwright {__version__}\n")
        raise typer.Exit


def about(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train any Hugging Face causal LM under any parallelism strategy, chosen by name, with one loop."""


def main() -> None:
    """Entry point of the command `meshwright`."""
    protect_children()
    escape_messages()
    prefer_expandable_segments()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # Characters that its encoding lacks are no reason to fail.
            with suppress(OSError):
                stream.reconfigure(errors="backslashreplace")
    code = 0
    try:
        # For the commands of plugins, too.
        with told(traceback=False):
            _check_place()
            app = command_line()
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
    # Python's own exit would unload torch piece by piece, which takes as long as its import.
    try:
        sys.stdout.flush()
    except OSError as error:
        os._exit(_output_failed(error))
    leave(code)


def _check_place() -> None:
    try:
        os.getcwd()
    except OSError as error:
        raise ConfigError(
            f"the current directory is not there any more ({error.strerror}). Go to another one, by cd."
        ) from None


def _output_failed(error: OSError) -> int:
    """Say so, if that is possible; return the exit code."""
    with suppress(OSError):
        say(f"error: the output cannot be written: {error.strerror}.\n", stderr=True)
    return 1


def strategies() -> None:
    """List the strategies: installed, broken (with the reason), and installable."""
    registry = get_registry()
    blocks = [_block(spec, registry.owner(name)) for name, spec in registry.strategies.items()]
    for title, lines in (
        ("broken", [str(failure) for failure in registry.failures]),
        ("installable, from a clone of meshwright", [f"{n}: {line}" for n, line in registry.installable.items()]),
    ):
        if lines:
            # Not wrapped, so that reasons and commands can be copied.
            blocks.append("\n".join([f"{title}:", *(indent(line, "  ") for line in lines)]))
    say("\n\n".join(blocks) + "\n")


def _block(spec: StrategySpec, owner: str) -> str:
    rows = {
        "aliases": ", ".join(spec.aliases),
        "shards": ", ".join(axis for axis in CLAIMABLE_AXES if axis in spec.axes) or "nothing",
        "wraps": "another strategy" if spec.wraps else "",
        "plugin": owner,
    }
    texts = [spec.summary, *(f"{label}: {text}" for label, text in rows.items() if text)]
    lines = [line for text in texts for line in wrap(text, 76, break_long_words=False)]
    return "\n".join([spec.name, *(f"    {line}" for line in lines)])


def add_commands(app: typer.Typer, registry: Registry) -> None:
    """Add the subcommands of each plugin.

    A plugin that fails, or whose command would hide another, adds none and is listed in the registry's `failures`.
    """
    for name, register in registry.implementations("register_commands"):
        own = typer.Typer()
        reason = _defect(own, register, app)
        if reason is None:
            app.add_typer(own)
        else:
            registry.set_aside(Failure(name, reason))


def _defect(own: typer.Typer, register: Any, app: typer.Typer) -> str | None:
    """Let a plugin register its commands in `own`; return why they cannot be added, if they cannot."""
    try:
        register(app=own)
        taken = set(get_group(own).commands) & set(get_group(app).commands)
    except (Exception, SystemExit) as error:
        # Whatever a plugin raises; see [Note: isolation] in the registry.
        return f"register_commands raised {type(error).__name__}: {error}"
    return f"its commands exist already: {', '.join(sorted(taken))}" if taken else None


@cache
def command_line() -> typer.Typer:
    """Return the command line, with the commands of the installed plugins."""
    app = typer.Typer(
        name="meshwright",
        cls=_Commands,
        help="Train any Hugging Face causal LM under any parallelism strategy, chosen by name, with one loop.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        callback=about,
    )
    app.command()(strategies)
    add_commands(app, get_registry())
    return app


def __getattr__(name: str) -> typer.Typer:
    if name == "app":
        return command_line()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""The command `meshwright`. Plugins add subcommands with the hook `register_commands`.

The implementation of a command, and torch, are imported only when the command runs.
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
from ..base.lazy import format_install_hint
from ..base.processes import exit_process, prefer_expandable_segments
from ..base.safe_path import enable_safe_path
from ..base.version import __version__
from ..files.command_helpers import exit_on_error
from ..files.terminal import echo, install_output_escaping
from ..files.versions import check_torch_version
from ..mesh.sizes import CLAIMABLE_AXES
from ..strategy.contract import StrategySpec
from ..strategy.registry import PluginFailure, Registry, get_registry

_OUTPUT_ERRNOS = (errno.ENOSPC, errno.EPIPE, errno.EIO, errno.EBADF)
COMMANDS_BY_EXTRA = {
    "run": "train export schema init checkpoint data",
    "plan": "plan explain",
    "cluster": "launch",
    "watch": "watch",
    "diagnose": "replay diff doctor profile",
    "testing": "check",
}
"""Commands of this project's plugins, by the extra that installs them."""
COMMAND_ORDER = (
    "train launch plan strategies check export schema watch replay diff init explain doctor checkpoint data profile"
)
"""Order of the subcommands in the help; those of other plugins follow."""


class _CommandGroup(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        order = COMMAND_ORDER.split()
        return sorted(super().list_commands(ctx), key=lambda name: order.index(name) if name in order else len(order))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and self.get_command(ctx, args[0]) is None:
            for extra, names in COMMANDS_BY_EXTRA.items():
                if args[0] in names.split():
                    raise ConfigError(
                        f"{args[0]}: this command is of a plugin that is not installed. {format_install_hint(extra)}"
                    )
        return super().resolve_command(ctx, args)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        echo(f"meshwright {__version__}\n")
        raise typer.Exit


def about(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train any Hugging Face causal LM under any parallelism strategy, chosen by name, with one loop."""


def main() -> None:
    """Entry point of the command `meshwright`."""
    enable_safe_path()
    install_output_escaping()
    prefer_expandable_segments()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # Escape characters that the stream's encoding does not support, instead of failing.
            with suppress(OSError):
                stream.reconfigure(errors="backslashreplace")
    code = 0
    try:
        # Also handles errors of plugins' commands.
        with exit_on_error(show_traceback=False):
            _check_current_directory()
            app = build_app()
            check_torch_version()
            app()
    except SystemExit as end:
        if not isinstance(end.code, int):
            raise
        code = end.code
    except OSError as error:
        if error.filename is not None or error.errno not in _OUTPUT_ERRNOS:
            raise
        code = _report_output_error(error)
    # Python's normal exit would unload torch, which takes as long as its import.
    try:
        sys.stdout.flush()
    except OSError as error:
        os._exit(_report_output_error(error))
    exit_process(code)


def _check_current_directory() -> None:
    try:
        os.getcwd()
    except OSError as error:
        raise ConfigError(
            f"the current directory is not there any more ({error.strerror}). Go to another one, by cd."
        ) from None


def _report_output_error(error: OSError) -> int:
    """Print an output error if possible; return the exit code."""
    with suppress(OSError):
        echo(f"error: the output cannot be written: {error.strerror}.\n", stderr=True)
    return 1


def strategies() -> None:
    """List strategies: installed, broken (with the reason) and installable.

    \b
    Examples:
      meshwright strategies
      python -m meshwright strategies
    """
    registry = get_registry()
    blocks = [_format_strategy(spec, registry.get_owner(name)) for name, spec in registry.strategies.items()]
    for title, lines in (
        ("broken", [str(failure) for failure in registry.failures]),
        ("installable, from a clone of meshwright", [f"{n}: {line}" for n, line in registry.install_commands.items()]),
    ):
        if lines:
            # Do not wrap these lines, so that users can copy reasons and commands.
            blocks.append("\n".join([f"{title}:", *(indent(line, "  ") for line in lines)]))
    echo("\n\n".join(blocks) + "\n")


def _format_strategy(spec: StrategySpec, owner: str) -> str:
    rows = {
        "aliases": ", ".join(spec.aliases),
        "shards": ", ".join(axis for axis in CLAIMABLE_AXES if axis in spec.axes) or "nothing",
        "wraps": "another strategy" if spec.is_wrapper else "",
        "plugin": owner,
    }
    texts = [spec.summary, *(f"{label}: {text}" for label, text in rows.items() if text)]
    lines = [line for text in texts for line in wrap(text, 76, break_long_words=False)]
    return "\n".join([spec.name, *(f"    {line}" for line in lines)])


def add_commands(app: typer.Typer, registry: Registry) -> None:
    """Add the subcommands of each plugin.

    If a plugin fails, or one of its commands already exists, none of its commands is added, and the failure is recorded
    in the registry.
    """
    for name, register in registry.find_implementations("register_commands"):
        own = typer.Typer()
        reason = _find_registration_error(own, register, app)
        if reason is None:
            app.add_typer(own)
        else:
            registry.record_failure(PluginFailure(name, reason))


def _find_registration_error(plugin_app: typer.Typer, register: Any, app: typer.Typer) -> str | None:
    """Register a plugin's commands in `plugin_app`; return why they cannot be added to `app`, or None."""
    try:
        register(app=plugin_app)
        taken = set(get_group(plugin_app).commands) & set(get_group(app).commands)
    except (Exception, SystemExit) as error:
        # A plugin may raise any exception; see [Note: isolation] in `meshwright.strategy.registry`.
        return f"register_commands raised {type(error).__name__}: {error}"
    return f"its commands exist already: {', '.join(sorted(taken))}" if taken else None


@cache
def build_app() -> typer.Typer:
    """Return the command-line app, with the commands of the installed plugins."""
    app = typer.Typer(
        name="meshwright",
        cls=_CommandGroup,
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
        return build_app()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

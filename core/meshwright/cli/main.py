"""The command `meshwright`. Plugins add subcommands with the hook `register_commands`.

The implementation of a command, and torch, are imported only when the command runs.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
from contextlib import suppress
from functools import cache
from io import TextIOWrapper
from itertools import dropwhile
from textwrap import indent, wrap
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command, get_group

from ..base.errors import ConfigError
from ..base.lazy import format_install_hint
from ..base.processes import exit_process, prefer_expandable_segments
from ..base.safe_path import enable_safe_path
from ..base.stopping import INTERRUPTED_EXIT_CODE
from ..base.version import __version__
from ..files.command_helpers import JsonOption, exit_on_error, write_json
from ..files.terminal import echo, install_output_escaping
from ..files.versions import check_torch_version
from ..mesh.sizes import CLAIMABLE_AXES
from ..strategy.contract import StrategySpec
from ..strategy.registry import PluginFailure, Registry, get_registry

_OUTPUT_ERRNOS = (errno.ENOSPC, errno.EPIPE, errno.EIO, errno.EBADF)
COMMANDS_BY_EXTRA = {
    "run": "train export schema init checkpoint data eval chat",
    "plan": "plan explain",
    "cluster": "launch",
    "watch": "watch",
    "diagnose": "replay diff doctor profile",
    "testing": "check",
}
"""Commands of this project's plugins, by the extra that installs them."""
COMMAND_PANELS = {
    "Start": "init doctor strategies schema",
    "Train": "train launch eval chat export",
    "Inspect": "explain watch checkpoint data profile replay diff",
    "Plan": "plan pipeline",
    "Extend": "check",
}
"""Commands in the order of the help, by panel; those of other plugins follow."""
SIMILAR_COMMANDS = {
    "train": "finetune fine-tune fit run sft pretrain resume start",
    "eval": "evaluate test lm-eval benchmark score",
    "chat": "generate inference infer serve talk ask predict",
    "export": "convert merge merge-lora consolidate save",
    "plan": "estimate estimate-memory search",
    "explain": "validate dry-run dryrun",
    "doctor": "env info collect-env",
    "data": "preprocess tokenize",
    "watch": "tensorboard monitor dashboard ui",
    "strategies": "list ls plugins",
    "launch": "submit slurm kubernetes",
    "init": "config new create",
}
"""Names that users of other tools try, by the command that does this here."""


class _CommandGroup(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        order = " ".join(COMMAND_PANELS.values()).split()
        return sorted(super().list_commands(ctx), key=lambda name: order.index(name) if name in order else len(order))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command: Any = super().get_command(ctx, cmd_name)
        for panel, names in COMMAND_PANELS.items():
            if command is not None and cmd_name in names.split():
                command.rich_help_panel = panel
        return command

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and self.get_command(ctx, args[0]) is None:
            for extra, names in COMMANDS_BY_EXTRA.items():
                if args[0] in names.split():
                    raise ConfigError(
                        f"{args[0]}: this command is of a plugin that is not installed. {format_install_hint(extra)}"
                    )
            for command, names in SIMILAR_COMMANDS.items():
                if args[0] in names.split():
                    raise ConfigError(f"there is no command {args[0]!r}. Use `meshwright {command}`.")
        return super().resolve_command(ctx, args)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        echo(f"meshwright {__version__}\n")
        raise typer.Exit


def about(
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_print_version, is_eager=True, help="Print the version.")
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
            code = _invoke(app)
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


def _invoke(app: typer.Typer) -> int:
    """Run the command that the arguments name; return its exit code."""
    command: Any = get_command(app)
    _hide_types_of_flags(command, command.make_context("meshwright", [], resilient_parsing=True))
    try:
        code = command.main(prog_name="meshwright", standalone_mode=False)
    except typer.Abort:
        # The user has ended a question, by Ctrl-C or the end of the input.
        return INTERRUPTED_EXIT_CODE
    except Exception as error:
        # The classes of usage errors depend on the version of typer.
        context = getattr(error, "ctx", None)
        if not hasattr(error, "format_message"):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            echo(f"{context.get_help()}\n" if context is not None else "", stderr=True)
            return ConfigError.exit_code
        raise ConfigError(_describe_usage_error(error, context)) from None
    return code if isinstance(code, int) else 0


def _describe_usage_error(error: Any, context: Any) -> str:
    path = "meshwright" if context is None else context.command_path
    message = re.sub(r" \(Possible options: .*\)", "", error.format_message().strip()).rstrip(".?")
    option, value = str(getattr(error, "option_name", "") or ""), ""
    if option.startswith("--"):
        # A setting that was written as an option: --steps 3, --steps=3.
        following = dropwhile(lambda each: each.partition("=")[0] != option, sys.argv)
        given, *rest = [*following, option]
        value = given.partition("=")[2] or next((each for each in rest[:1] if not each.startswith("-")), "...")
    extra = [each for each in sys.argv[1:] if "=" in each and not each.startswith("-") and each in message]
    takes_settings = context is not None and any("--set" in each.opts for each in context.command.params)
    if takes_settings and (option or extra):
        setting = f"{option.lstrip('-').replace('-', '_')}={value}" if option else extra[0]
        return f"{path}: {message}. Settings of the run file are changed by --set: {path} ... --set {setting}"
    mark = "?" if "Did you mean" in message else ". `meshwright init` writes one." if "'run_file'" in message else "."
    return f"{path}: {message}{mark} `{path} --help` lists what it accepts."


def _hide_types_of_flags(command: Any, context: Any) -> None:
    """Remove the type from the help of options that take no value."""
    for parameter in (*command.params, command.get_help_option(context)):
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    for each in getattr(command, "commands", {}).values():
        _hide_types_of_flags(each, context)


def _check_current_directory() -> None:
    try:
        os.getcwd()
    except OSError as error:
        raise ConfigError(
            f"the current directory is not there any more ({error.strerror}). Go to another one, by cd."
        ) from None


def _report_output_error(error: OSError) -> int:
    """Print an output error if possible; return the exit code. A reader that has ended, such as `head`, is no error."""
    if error.errno == errno.EPIPE:
        return 128 + signal.SIGPIPE
    with suppress(OSError):
        echo(f"error: the output cannot be written: {error.strerror}.\n", stderr=True)
    return 1


def strategies(json_file: JsonOption = None) -> None:
    """List strategies: installed, broken (with the reason) and installable.

    \b
    Examples:
      meshwright strategies
      meshwright strategies --json -
    """
    registry = get_registry()
    values = {
        "installed": [
            {
                "name": name,
                "aliases": list(spec.aliases),
                "summary": spec.summary,
                "shards": [axis for axis in CLAIMABLE_AXES if axis in spec.axes],
                "wraps": spec.is_wrapper,
                "plugin": registry.get_owner(name),
            }
            for name, spec in registry.strategies.items()
        ],
        "broken": [str(failure) for failure in registry.failures],
        "installable": dict(registry.install_commands),
    }
    with exit_on_error(show_traceback=False):
        if write_json(values, json_file):
            return
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
        context_settings={"help_option_names": ["-h", "--help"]},
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

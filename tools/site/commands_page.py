"""The reference of the command line, docs/reference/cli.md: each command's help, options and recorded output.

The page is written again around what is written by hand: the text before the first command, and that after the
generated part of each command.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Any

from links import DOCS, ROOT
from typer.main import get_group

from meshwright.cli.main import build_app

sys.path.append(str(ROOT / "tools"))
from command_outputs import EXAMPLES, RESULTS

PAGE = DOCS / "reference" / "cli.md"
_PART = re.compile(r"<!-- command (?P<name>[\w ]+): begin -->.*?<!-- command (?P=name): end -->\n", flags=re.DOTALL)
_VALUES = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH"}
_ALL_COMMANDS = ("--traceback",)
"""Options that the page describes once."""


def list_commands(command: Any = None, words: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield each command of the command line by its words, in the order of the help."""
    command = command or get_group(build_app())
    if not hasattr(command, "commands"):
        yield " ".join(words), command
    else:
        for name in command.list_commands(None):
            yield from list_commands(command.commands[name], (*words, name))


def render() -> str:
    """Return the page: commands in the order of the help, with what the page has by hand."""
    header, notes = read_notes(PAGE.read_text(encoding="utf-8"))
    outputs = json.loads(RESULTS.read_text(encoding="utf-8"))
    parts, last = [header], None
    groups = {name: _find_group(name) for name, _ in list_commands()}
    for group in dict.fromkeys(groups.values()):
        for name, command in list_commands():
            if groups[name] != group:
                continue
            heading = [f"## {group}", ""] if group != last and group else []
            last = group
            lines = [*heading, *_render_command(name, command, outputs, level="###" if group else "##")]
            marked = [f"<!-- command {name}: begin -->", "", *lines, "", f"<!-- command {name}: end -->", ""]
            parts.append("\n".join(marked) + notes.get(name, ""))
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def read_notes(page: str) -> tuple[str, Mapping[str, str]]:
    """Return what a page has by hand: the text before the first command, and that after each command."""
    matches = list(_PART.finditer(page))
    ends = [match.start() for match in matches[1:]] + [len(page)]
    notes = {match["name"]: page[match.end() : end] for match, end in zip(matches, ends, strict=True)}
    return page[: matches[0].start()] if matches else page, notes


def _find_group(name: str) -> str:
    """Return the group under which the help lists a command, or an empty string."""
    top = get_group(build_app()).commands[name.split()[0]]
    panel = getattr(top, "rich_help_panel", None)
    return panel if isinstance(panel, str) else ""


def _render_command(name: str, command: Any, outputs: Mapping[str, list[str]], *, level: str) -> Iterator[str]:
    if name not in outputs:
        raise KeyError(f"{RESULTS.relative_to(ROOT)} has no output of {name!r}. Add it to tools/command_outputs.py.")
    text, _, examples = inspect.cleandoc(command.help or "").partition("\b\nExamples:\n")
    yield f"{level} {name}"
    yield ""
    yield _escape("\n\n".join(" ".join(paragraph.split()) for paragraph in text.strip().split("\n\n")))
    yield ""
    if examples.strip():
        yield from ("```sh", inspect.cleandoc(examples).strip(), "```", "")
    parameters = [each for each in command.params if each.opts[0] not in _ALL_COMMANDS]
    if parameters:
        yield from ("| argument or option | default | |", "|---|---|---|")
    # Arguments first, as in the help.
    for each in sorted(parameters, key=lambda each: bool(each.param_type_name != "argument")):
        yield _render_parameter(each)
    yield from ("", "```text", f"$ meshwright {EXAMPLES[name].words}", *outputs[name], "```")


def _format_argument(parameter: Any) -> str:
    return str(parameter.metavar or parameter.name.upper())


def _render_parameter(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        shown = f"`{_format_argument(parameter)}`"
    else:
        value = _format_value_name(parameter)
        names = [*parameter.opts, *parameter.secondary_opts]
        shown = ", ".join(f"`{name} {value}`" if value else f"`{name}`" for name in names)
    default, text = parameter.default, _escape(parameter.help or "")
    if parameter.multiple:
        text += " Repeatable." if "repeat" not in text else ""
    shown_default = "required" if parameter.required else "" if default in (None, False) else f"`{default}`"
    return f"| {shown} | {shown_default} | {text} |"


def _format_value_name(parameter: Any) -> str:
    """Return the placeholder of an option's value; an empty string for a flag."""
    if parameter.metavar:
        return str(parameter.metavar)
    kinds = set(_find_types(parameter.type_descriptor.annotation))
    return "" if bool in kinds else next((word for kind, word in _VALUES.items() if kind in kinds), "TEXT")


def _find_types(annotation: Any) -> Iterator[Any]:
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, UnionType, list, tuple, typing.Annotated):
        for each in typing.get_args(annotation):
            yield from _find_types(each)
    else:
        yield annotation


def _escape(text: str) -> str:
    return text.replace("|", "&#124;").replace("<", "&lt;")

"""Names that are imported on first use: those of a stub file, which type checkers also read, and plugins."""

from __future__ import annotations

import importlib
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType


@cache
def read_stub_names(file: str) -> Mapping[str, tuple[str, str]]:
    """Return module and name of each import in the stub of `file`; modules of this package start with "."."""
    import ast
    from pathlib import Path

    stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    lines = [line for line in stub.body if isinstance(line, ast.ImportFrom)]
    return {each.name: (f"{'.' * line.level}{line.module}", each.name) for line in lines for each in line.names}


def import_lazily(source_file: str, module: str, name: str) -> object:
    """Import a name that the stub of `source_file`, the source of `module`, lists.

    Raises:
        AttributeError: the stub has no such name.
        ConfigError: the name belongs to a plugin of this project that is not installed.
    """
    if name not in read_stub_names(source_file):
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    target, own = read_stub_names(source_file)[name]
    if target.startswith("."):
        return getattr(importlib.import_module(target, "meshwright"), own)
    extra, _, inner = target.removeprefix("meshwright_").partition(".")
    return getattr(import_plugin(extra, inner), own)


def format_install_command(extra: str) -> str:
    """Return the pip command that installs a plugin of this project, run in a clone of it."""
    return f"pip install -c constraints.txt -e '.[{extra}]'"


def format_install_hint(extra: str) -> str:
    """Return a sentence for error messages that explains how to install a plugin of this project."""
    return f"Install it from a clone of meshwright: {format_install_command(extra)}"


def import_plugin(extra: str, module: str = "") -> ModuleType:
    """Import the package of a plugin of this project, or a module of it.

    Raises:
        ConfigError: the plugin is not installed; the message explains how to install it.
    """
    from importlib.util import find_spec

    from .errors import ConfigError

    package = f"meshwright_{extra}"
    if find_spec(package) is None:
        raise ConfigError(f"{package} is not installed. {format_install_hint(extra)}")
    return importlib.import_module(f"{package}.{module}" if module else package)

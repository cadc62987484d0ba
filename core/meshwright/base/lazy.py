"""Names that are imported on first use: those of a stub, which type checkers read too, and plugins of this project."""

from __future__ import annotations

import importlib
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType


@cache
def read_stub_names(file: str) -> Mapping[str, tuple[str, str]]:
    """Return the module and the name there of each name in the stub of `file`; "." begins a module of this package."""
    import ast
    from pathlib import Path

    stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    lines = [line for line in stub.body if isinstance(line, ast.ImportFrom)]
    return {each.name: (f"{'.' * line.level}{line.module}", each.name) for line in lines for each in line.names}


def import_lazily(source_file: str, module: str, name: str) -> object:
    """Return what the stub of `source_file`, the source of `module`, means by a name.

    Raises:
        AttributeError: the stub has no such name.
        ConfigError: it is of a plugin of this project that is not installed.
    """
    if name not in read_stub_names(source_file):
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    place, own = read_stub_names(source_file)[name]
    if place.startswith("."):
        return getattr(importlib.import_module(place, "meshwright"), own)
    extra, _, inner = place.removeprefix("meshwright_").partition(".")
    return getattr(import_plugin(extra, inner), own)


def format_install_command(extra: str) -> str:
    """Return the pip line that installs a plugin of this project, to be run in a clone of it."""
    return f"pip install -c constraints.txt -e '.[{extra}]'"


def format_install_hint(extra: str) -> str:
    """Return a sentence for errors: how to install a plugin of this project."""
    return f"Install it from a clone of meshwright: {format_install_command(extra)}"


def import_plugin(extra: str, module: str = "") -> ModuleType:
    """Return the package of a plugin of this project, or a module of it.

    Raises:
        ConfigError: it is not installed; the text says how to install it.
    """
    from importlib.util import find_spec

    from .errors import ConfigError

    package = f"meshwright_{extra}"
    if find_spec(package) is None:
        raise ConfigError(f"{package} is not installed. {format_install_hint(extra)}")
    return importlib.import_module(f"{package}.{module}" if module else package)

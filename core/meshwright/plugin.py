"""The import surface for authors of strategies, axes, objectives, trackers, launchers and commands.

Whatever a plugin needs beyond `meshwright` and `meshwright.testing` is imported from here; modules below may move
between releases. `plugin.pyi` lists the names, and docs/reference describes them. Each is imported on first use, so
that a plugin's module can be loaded without torch.
"""

from __future__ import annotations

import ast
import importlib
from functools import cache
from pathlib import Path


@cache
def _sources() -> dict[str, tuple[str, str]]:
    """Return the module, relative to this package, and the name there, of each name in the stub."""
    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    lines = [line for line in stub.body if isinstance(line, ast.ImportFrom)]
    return {each.asname or each.name: (f".{line.module}", each.name) for line in lines for each in line.names}


def __getattr__(name: str) -> object:
    if name not in _sources():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, own = _sources()[name]
    value = globals()[name] = getattr(importlib.import_module(module, __package__), own)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_sources()])

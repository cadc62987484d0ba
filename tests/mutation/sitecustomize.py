"""Changes one module in every process that has this folder on its PYTHONPATH: one of its options is ignored, see
`ignore`, or a bug is planted in its source, see `tests/bugs`.

Python imports this module at its start, before any other code of the process.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

OPTION, HOW = "MESHWRIGHT_MUTATION_OPTION", "MESHWRIGHT_MUTATION_HOW"
BUG = "MESHWRIGHT_PLANTED_BUG"
"""A file of JSON: module, text of its source, what is planted in its place. Read for each module, since processes that
live longer than a bug fork others; empty: no bug."""


class Finder(MetaPathFinder):
    """Lets others find a module, and changes how it is loaded if it is the one to be changed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        load = _change_of(name) if name.partition(".")[0].startswith("meshwright") else None
        if load is None:
            return None
        for finder in sys.meta_path:
            spec = finder.find_spec(name, path, target) if finder is not self else None
            if spec is not None and spec.loader is not None:
                spec.loader = Changed(spec.loader, load)
                return spec
        return None


class Changed(Loader):
    """Loads in another way than another loader."""

    def __init__(self, loader: Any, load: Callable[[Any, ModuleType], None]) -> None:
        self.loader, self.load = loader, load

    def create_module(self, spec: Any) -> Any:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.load(self.loader, module)

    def get_code(self, name: str) -> Any:
        """For `python -m`, which executes no module."""
        old, new = _bug_of(name)
        return _planted_code(self.loader, name, old, new) if old else self.loader.get_code(name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


def _change_of(name: str) -> Callable[[Any, ModuleType], None] | None:
    """How a module is to be loaded; None: as ever."""
    option = os.environ.get(OPTION, "")
    if option and name == option.partition(":")[0]:
        return _ignoring
    old, new = _bug_of(name)
    return (lambda loader, made: _planted(loader, made, old, new)) if old else None


def _bug_of(name: str) -> tuple[str, str]:
    """What of its source gives way to what; nothing: as ever."""
    text = Path(os.environ[BUG]).read_text(encoding="utf-8") if os.environ.get(BUG) else ""
    module, old, new = json.loads(text) if text else ("", "", "")
    return (old, new) if name == module else ("", "")


def _ignoring(loader: Any, module: ModuleType) -> None:
    import ignore

    loader.exec_module(module)
    ignore.ignore(os.environ[OPTION], os.environ[HOW])


def _planted(loader: Any, module: ModuleType, old: str, new: str) -> None:
    exec(_planted_code(loader, module.__name__, old, new), module.__dict__)


def _planted_code(loader: Any, name: str, old: str, new: str) -> Any:
    source = loader.get_source(name)
    if source.count(old) != 1:
        raise ImportError(f"{name} holds {old!r} {source.count(old)} times, not once")
    return compile(source.replace(old, new), loader.get_filename(name), "exec")


if os.environ.get(OPTION) or os.environ.get(BUG):
    sys.meta_path.insert(0, Finder())

"""Change one module in every process that has this folder on its PYTHONPATH. Python imports this module at its start.

The environment variable names a file of JSON with `module` and either `old` and `new` (a text of its source and the
replacement, see tests/bugs) or `owner`, `option` and `how` (see `ignore`). An empty file changes nothing. The file is
read for each module, since a process may outlive a change and fork others under the next one.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.abc import Loader, MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

FILE = os.environ.get("MESHWRIGHT_TEST_CHANGE", "")


class Finder(MetaPathFinder):
    """Replaces the loader of the module that is changed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        text = Path(FILE).read_text(encoding="utf-8") if name.startswith("meshwright") else ""
        change = json.loads(text) if text else {}
        if change.get("module") != name:
            return None
        for finder in sys.meta_path:
            spec = finder.find_spec(name, path, target) if finder is not self else None
            if spec is not None and spec.loader is not None:
                spec.loader = Changed(spec.loader, change)
                return spec
        return None


class Changed(Loader):
    """Loads a module with the change."""

    def __init__(self, loader: Any, change: dict[str, str]) -> None:
        self.loader, self.change = loader, change

    def create_module(self, spec: Any) -> Any:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        exec(self.get_code(module.__name__), module.__dict__)
        if "option" in self.change:
            from ignore import ignore

            ignore(module, self.change["owner"], self.change["option"], self.change["how"])

    def get_code(self, name: str) -> Any:
        """Compiled source; also called for `python -m`."""
        if "old" not in self.change:
            return self.loader.get_code(name)
        source, old = self.loader.get_source(name), self.change["old"]
        if source.count(old) != 1:
            raise ImportError(f"{name} holds {old!r} {source.count(old)} times, not once")
        return compile(source.replace(old, self.change["new"]), self.loader.get_filename(name), "exec")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


if FILE:
    sys.meta_path.insert(0, Finder())

"""Makes one option be ignored in every process that has this folder on its PYTHONPATH; see `ignore`.

Python imports this module at its start, before any other code of the process.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType
from typing import Any

OPTION, HOW = "MESHWRIGHT_MUTATION_OPTION", "MESHWRIGHT_MUTATION_HOW"


class Finder(MetaPathFinder):
    """Lets the module of an option be loaded as ever, then has the option be ignored."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != os.environ[OPTION].partition(":")[0]:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = Changed(spec.loader)
        return spec


class Changed(Loader):
    """Loads with another loader."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def create_module(self, spec: Any) -> Any:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        import ignore

        self.loader.exec_module(module)
        ignore.ignore(os.environ[OPTION], os.environ[HOW])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


if os.environ.get(OPTION):
    sys.meta_path.insert(0, Finder())

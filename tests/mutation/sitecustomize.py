"""Makes one option of one config be ignored, in every process that has this folder on its PYTHONPATH.

A test build, not a part of meshwright: `sweep.py` beside it starts tests under it and sees whether one of them fails.
The environment names the option, as `module:Class.option`, and how it is ignored:

- `acting`: the config takes the value and checks it; whoever reads the option afterwards finds the default.
- `given`: the value is replaced by the default before the config sees it, so that nothing refuses it either.

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
    """Lets a module be loaded as ever, then changes a class of it."""

    def __init__(self, module: str, cls: str, option: str, how: str) -> None:
        self.module, self.cls, self.option, self.how = module, cls, option, how

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self.module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = Changed(spec.loader, self)
        return spec


class Changed(Loader):
    """Loads with another loader, and then changes the class."""

    def __init__(self, loader: Any, finder: Finder) -> None:
        self.loader, self.finder = loader, finder

    def create_module(self, spec: Any) -> Any:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        change = {"acting": ignore_afterwards, "given": ignore_given}[self.finder.how]
        change(getattr(module, self.finder.cls), self.finder.option)
        if self.finder.how == "given":
            rebuild(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


def ignore_afterwards(cls: Any, option: str) -> None:
    """Give the default to everybody but pydantic and the validators that it calls."""
    read = cls.__getattribute__

    def instead(self: Any, name: str) -> Any:
        if name == option and not is_validating():
            return cls.model_fields[option].get_default(call_default_factory=True)
        return read(self, name)

    cls.__getattribute__ = instead


def is_validating() -> bool:
    """Whether pydantic called the code that reads an option."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith("pydantic"):
            return True
        frame = frame.f_back
    return False


def ignore_given(cls: Any, option: str) -> None:
    """Drop the option from what a config is made of, by validating as a class would that drops it first."""
    from pydantic import model_validator

    def drop(kind: Any, values: Any) -> Any:
        return {key: value for key, value in values.items() if key != option} if isinstance(values, dict) else values

    dropping = model_validator(mode="before")(classmethod(drop))
    changed = type(cls.__name__, (cls,), {"drop_ignored_option": dropping, "__module__": cls.__module__})
    # Whoever has the class by now has the old one: its own validator is that of the new class from here on.
    for name in ("__pydantic_validator__", "__pydantic_core_schema__", "__pydantic_decorators__"):
        setattr(cls, name, getattr(changed, name))


def rebuild(module: ModuleType) -> None:
    """Have the module's other configs take the changed class where they hold one."""
    for each in vars(module).values():
        if isinstance(each, type) and hasattr(each, "model_rebuild") and each.__module__ == module.__name__:
            each.model_rebuild(force=True)


if os.environ.get(OPTION):
    _module, _, _rest = os.environ[OPTION].partition(":")
    _cls, _, _option = _rest.partition(".")
    sys.meta_path.insert(0, Finder(_module, _cls, _option, os.environ[HOW]))

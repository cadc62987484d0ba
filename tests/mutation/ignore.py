"""Makes one option of one config, or of one function, be ignored in this process.

A test build, not a part of meshwright: `sweep.py` starts tests under it and sees whether one of them fails. An option
is named as `module:Class.option` or `module:function.argument`, and ignored in one of two ways:

- `acting`: the config takes the value, checks it and gives it back in its data and to tests; whoever else reads the
  option finds the default.
- `given`: the value is dropped before the config sees it, so that nothing refuses it either.

Arguments of functions are dropped both ways.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

INSTEAD: dict[str, Any] = {
    "steps": 1,
    "batch_size": 16,
    "model": {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 1},
}
"""For options without a default."""


def ignore(option: str, how: str) -> None:
    """Change the class or function that has the option, wherever it is held by now."""
    place, _, name = option.rpartition(".")
    module, _, owner_name = place.partition(":")
    owner = getattr(importlib.import_module(module), owner_name)
    if inspect.isfunction(owner):
        replace(owner, without_argument(owner, name))
    elif how == "acting":
        ignore_afterwards(owner, name)
    else:
        for each in [owner, *subclasses(owner)]:
            ignore_given(each, name)
        rebuild()


def run_ignoring(option: str, how: str, task: Callable[..., Any], *arguments: Any) -> Any:
    """A task of a rank that ignores an option; the rank is one that lives for this option alone."""
    if not hasattr(run_ignoring, "done"):
        ignore(option, how)
        run_ignoring.done = True  # type: ignore[attr-defined]
        # What was unpickled before, beside this function, may hold what has been replaced since.
        task = getattr(sys.modules[task.__module__], getattr(task, "__qualname__", ""), task)
    return task(*arguments)


def replace(function: Any, changed: Any) -> None:
    """Have every module that holds a function hold another one."""
    for module in list(sys.modules.values()):
        for name, value in list(vars(module).items()) if hasattr(module, "__dict__") else ():
            if value is function:
                setattr(module, name, changed)


def without_argument(function: Any, argument: str) -> Any:
    """The function, to which an argument is never given."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def changed(*given: Any, **named: Any) -> Any:
        bound = signature.bind(*given, **named)
        bound.arguments.pop(argument, None)
        # An argument that is left out leaves no place for those behind it.
        bound.apply_defaults()
        return function(*bound.args, **bound.kwargs)

    return changed


def ignore_afterwards(cls: Any, option: str) -> None:
    """Give the default to everybody but tests, pydantic and the validators that it calls."""
    read, field = cls.__getattribute__, cls.model_fields[option]

    def instead(self: Any, name: str) -> Any:
        if name != option or "/test_" in sys._getframe(1).f_code.co_filename or is_validating():
            return read(self, name)
        return INSTEAD[option] if field.is_required() else field.get_default(call_default_factory=True)

    cls.__getattribute__ = instead


def is_validating() -> bool:
    """Whether pydantic called the code that reads an option."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith("pydantic"):
            return True
        frame = frame.f_back
    return False


def subclasses(cls: Any) -> Iterator[Any]:
    """All that are defined by now."""
    for each in cls.__subclasses__():
        yield each
        yield from subclasses(each)


def ignore_given(cls: Any, option: str) -> None:
    """Drop the option from what a config is made of, by validating as a class would that drops it first."""
    from pydantic import model_validator

    field = cls.model_fields[option]
    kept = {field.alias or option: INSTEAD[option]} if field.is_required() else {}

    def drop(kind: Any, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {key: value for key, value in values.items() if key not in (option, field.alias)} | kept

    dropping = model_validator(mode="before")(classmethod(drop))
    changed = type(cls.__name__, (cls,), {"drop_ignored_option": dropping, "__module__": cls.__module__})
    # Whoever has the class by now has the old one: its own validator is that of the new class from here on.
    for name in ("__pydantic_validator__", "__pydantic_core_schema__", "__pydantic_decorators__"):
        setattr(cls, name, getattr(changed, name))


def rebuild() -> None:
    """Have all configs take the changed class where they hold one."""
    from meshwright.base.validation import FrozenModel

    for each in subclasses(FrozenModel):
        each.model_rebuild(force=True)

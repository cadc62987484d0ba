"""Make one option of a config, or one argument of a function, have no effect in this process.

- `acting`: the config takes the value, checks it and returns it to tests; all other code reads the default.
- `given`: the value is dropped before the config is validated, so nothing refuses it either.

An argument of a function is dropped in both cases.
"""

from __future__ import annotations

import functools
import inspect
import sys
from types import ModuleType
from typing import Any

REQUIRED: dict[str, Any] = {
    "steps": 1,
    "batch_size": 16,
    "model": {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 1},
}  # Values for options without a default


def ignore(module: ModuleType, owner_name: str, option: str, how: str) -> None:
    """Change a class or function of a module that has just been executed."""
    owner = getattr(module, owner_name)
    if inspect.isfunction(owner):
        setattr(module, owner_name, _without_argument(owner, option))
    elif how == "acting":
        _ignore_acting(owner, option)
    else:
        for cls in [each for each in vars(module).values() if inspect.isclass(each) and issubclass(each, owner)]:
            _ignore_given(cls, option)
        for cls in [each for each in vars(module).values() if hasattr(each, "model_rebuild")]:
            cls.model_rebuild(force=True)


def _without_argument(function: Any, argument: str) -> Any:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def changed(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.arguments.pop(argument, None)
        bound.apply_defaults()
        return function(*bound.args, **bound.kwargs)

    return changed


def _ignore_acting(cls: Any, option: str) -> None:
    """Return the default to all callers but tests, pydantic and validators."""
    read, field = cls.__getattribute__, cls.model_fields[option]

    def read_default(self: Any, name: str) -> Any:
        if name != option or "/test_" in sys._getframe(1).f_code.co_filename or _is_validating():
            return read(self, name)
        return REQUIRED[option] if field.is_required() else field.get_default(call_default_factory=True)

    cls.__getattribute__ = read_default


def _is_validating() -> bool:
    frame: Any = sys._getframe(2)
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith("pydantic"):
            return True
        frame = frame.f_back
    return False


def _ignore_given(cls: Any, option: str) -> None:
    """Give a class the validator of a subclass that drops the option first."""
    from pydantic import model_validator

    field = cls.model_fields[option]
    required = {field.alias or option: REQUIRED[option]} if field.is_required() else {}

    def drop(kind: Any, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {key: value for key, value in values.items() if key not in (option, field.alias)} | required

    dropping = model_validator(mode="before")(classmethod(drop))
    changed = type(cls.__name__, (cls,), {"drop_ignored_option": dropping, "__module__": cls.__module__})
    for name in ("__pydantic_validator__", "__pydantic_core_schema__", "__pydantic_decorators__"):
        setattr(cls, name, getattr(changed, name))

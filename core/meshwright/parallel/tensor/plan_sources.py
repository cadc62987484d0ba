"""Plans that a model brings, and plans at an import path."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from torch import nn

from ...base.errors import ConfigError
from ...files.class_paths import import_class_from_path
from ...strategy.hooks import StyleName


def plans_within(model: nn.Module) -> dict[str, StyleName]:
    """The plans of the models of transformers in a model, merged; where two name a module, the outer one's counts."""
    plans = [(name, getattr(module, "tp_plan", None)) for name, module in reversed(list(model.named_modules()))]
    return {
        f"{name}.{key}" if name else key: style
        for name, plan in plans
        if isinstance(plan, Mapping)
        for key, style in plan.items()
    }


def imported_plan(path: str, model: nn.Module) -> Mapping[str, StyleName]:
    """The plan at an import path: a dict, or what a function returns for the model.

    Raises:
        ConfigError: nothing is there, it is not to be imported, it gives no dict, or the function needs more than the
            model.
    """
    found = import_class_from_path(path, kind=("dict", "function"))
    if callable(found):
        parameters = inspect.signature(found).parameters.values()
        required = [each for each in parameters if each.default is each.empty and each.kind not in _VARIADIC]
        if len(required) > 1 or any(each.kind is each.KEYWORD_ONLY for each in required):
            raise ConfigError(
                f"tp_plan={path!r} is a function that needs {', '.join(each.name for each in required)}, but it is "
                f"called with the model, or with nothing. Give its other arguments defaults."
            )
        takes_model = any(each.kind not in (each.KEYWORD_ONLY, each.VAR_KEYWORD) for each in parameters)
        found = found(model) if takes_model else found()
    if not isinstance(found, Mapping):
        raise ConfigError(f"tp_plan={path!r} is a {type(found).__name__}, not a dict or a function returning one.")
    return found


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

"""Objectives by name, as a run file names them. No torch in this module."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from ..base.errors import ConfigError, nearest
from ..base.validation import validated
from ..files.class_paths import check_import, import_class_from_path
from .base import Objective
from .heads import Reward, Value
from .policy import GRPO, PPO
from .preference import DPO, KTO, ORPO, SimPO
from .supervised import CrossEntropy, Distill, Unlikelihood

_OBJECTIVES: tuple[type[Objective], ...] = (
    CrossEntropy,
    Distill,
    Unlikelihood,
    DPO,
    KTO,
    ORPO,
    SimPO,
    GRPO,
    PPO,
    Value,
    Reward,
)


def list_objectives() -> Mapping[str, type[Objective]]:
    """The objectives that ship, by name: each a frozen config whose fields are its options."""
    return MappingProxyType({cls.name: cls for cls in _OBJECTIVES})


def get_objective(value: Any) -> Callable[..., Any]:
    """The objective that a value stands for.

    Args:
        value: a callable, taken as it is; the name of an objective that ships, or the import path of a function or a
            class, see `meshwright.allow_imports`; or a mapping of `name`, either of both, and options: the fields of
            the objective, or the arguments of the class.

    Raises:
        ConfigError: there is none of that name, or its options are wrong.
    """
    if callable(value):
        found: Callable[..., Any] = value
        return found
    name, options = (value, {}) if isinstance(value, str) else _parts(value)
    known = list_objectives()
    if name in known:
        return validated(known[name], options, where=f"objective {name!r}")
    if "." not in name:
        raise ConfigError(
            f"there is no objective {name!r}.{nearest(name, known)} Those that ship: {', '.join(sorted(known))}. Name "
            f"one of your own by its import path, such as 'my_package.my_objective'."
        )
    return _imported(name, options)


def check_objective(value: Any) -> None:
    """Raise what `get_objective` does, as far as it is known without importing anything that the value names."""
    name = value if isinstance(value, str) else None if callable(value) else _parts(value)[0]
    if name is not None and name not in list_objectives() and "." in name:
        check_import(name)
    else:
        get_objective(value)


def _parts(value: Any) -> tuple[str, dict[str, Any]]:
    """Name and options of a mapping."""
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        raise ConfigError(
            f"{value!r:.200} is no objective. Give a name ({', '.join(sorted(list_objectives()))}), a mapping with "
            f"`name` and options, the import path of a function or class, or a callable."
        )
    return value["name"], {str(key): each for key, each in value.items() if key != "name"}


def _imported(path: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    """The function, or an object of the class, at an import path: an objective of ours, or anything that a module of
    the user's own defines and that can be called."""
    found = import_class_from_path(path, kind=("function", "class"), base=Objective)
    if not inspect.isclass(found):
        if options:
            raise ConfigError(
                f"objective {path!r} is a function, which has no options, and got {', '.join(sorted(options))}. Name "
                f"a class that takes them."
            )
        function: Callable[..., Any] = found
        return function
    if not any("__call__" in vars(cls) for cls in found.__mro__):
        raise ConfigError(f"objective {path!r} is a class whose objects cannot be called. Give it __call__.")
    made: Callable[..., Any] = _made(found, path, options)
    return made


def _made(cls: type, path: str, options: Mapping[str, Any]) -> Any:
    if issubclass(cls, Objective):
        return validated(cls, options, where=f"objective {path!r}")
    known = inspect.signature(cls).parameters
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in known.values())
    for key in () if takes_any else options:
        if key not in known:
            allowed = ", ".join(known) or "none"
            raise ConfigError(f"objective {path!r} has no option {key!r}.{nearest(key, known)} Allowed: {allowed}.")
    try:
        return cls(**options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"objective {path!r} cannot be made from {dict(options)}: {error}") from None

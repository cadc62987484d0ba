"""Look up registered objectives by name. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

from ..base.errors import ConfigError, suggest_match
from ..base.lazy import format_install_hint
from ..base.validation import validate_config
from ..strategy.registry import Registry, get_registry
from .base import ObjectiveConfig


def list_objectives(registry: Registry | None = None) -> Mapping[str, type[ObjectiveConfig]]:
    """Return the registered objectives by name: config classes whose fields are the options.

    Raises:
        ConfigError: two plugins register the same name, or a plugin registers something else than an objective.
    """
    objectives: dict[str, type[ObjectiveConfig]] = {}
    for plugin, register in (registry or get_registry()).find_implementations("register_objectives"):
        for cls in (cls for classes in register() for cls in classes):
            if not (isinstance(cls, type) and issubclass(cls, ObjectiveConfig) and hasattr(cls, "name")):
                raise ConfigError(f"plugin {plugin} brings {cls!r}, which is no meshwright.plugin.ObjectiveConfig.")
            if cls.name in objectives:
                raise ConfigError(f"two plugins bring an objective {cls.name!r}; one is {plugin}. Uninstall one.")
            objectives[cls.name] = cls
    return MappingProxyType(objectives)


def get_objective(value: Any, registry: Registry | None = None) -> Callable[..., Any]:
    """Return an objective from its name or config.

    Args:
        value: a callable, returned unchanged; the name of a registered objective; or a mapping of `name` and options.
        registry: where objectives are looked up; None: the installed plugins.

    Raises:
        ConfigError: there is no objective of that name, or its options are invalid.
    """
    if callable(value):
        objective: Callable[..., Any] = value
        return objective
    known = list_objectives(registry)
    names = ", ".join(sorted(known)) or "none"
    name: Any = value
    options: dict[str, Any] = {}
    if isinstance(value, Mapping) and isinstance(value.get("name"), str):
        name, options = value["name"], {str(key): each for key, each in value.items() if key != "name"}
    if not isinstance(name, str):
        raise ConfigError(
            f"{value!r:.200} is no objective. Give a name ({names}), a mapping with `name` and options, or a callable."
        )
    if name in known:
        return validate_config(known[name], options, where=f"objective {name!r}")
    own = "Register one of your own with the hook register_objectives of a plugin, or pass a callable in Python."
    if find_spec("meshwright_objectives") is None:
        own += f" Those of this project are of a plugin that is not installed. {format_install_hint('objectives')}"
    if "." in name:
        raise ConfigError(f"{name!r} is no objective: import paths are not taken. Registered: {names}. {own}")
    raise ConfigError(f"there is no objective {name!r}.{suggest_match(name, known)} Registered: {names}. {own}")


def check_objective(value: Any) -> None:
    """Raise ConfigError if `get_objective` does."""
    get_objective(value)

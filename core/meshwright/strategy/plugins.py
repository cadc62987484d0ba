"""One plugin by itself: what it is called, what is wrong with it, and its hooks called apart from those of others."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from importlib.metadata import EntryPoint
from typing import Any

import pluggy
from pydantic import BaseModel

from ..mesh.sizes import CLAIMABLE_AXES
from . import hooks as hookspecs
from .spec import StrategySpec

ENTRY_POINT_GROUP = "meshwright"


def normalized(name: str) -> str:
    """Names are compared in lower case, with '-' as '_'."""
    return name.strip().lower().replace("-", "_")


def new_plugin_manager() -> pluggy.PluginManager:
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    return manager


def plugin_name(entry_point: EntryPoint) -> str:
    distribution = entry_point.dist.name if entry_point.dist is not None else entry_point.value
    return f"{entry_point.name} ({distribution})"


def defect_of(plugin: Any, name: str) -> str | None:
    """Try a plugin in a plugin manager of its own; see [Note: isolation]."""
    trial = new_plugin_manager()
    try:
        trial.register(plugin, name=name)
        trial.check_pending()
    except (Exception, SystemExit) as error:
        known = [hook for hook in vars(hookspecs) if hasattr(getattr(hookspecs, hook), "meshwright_spec")]
        return f"{type(error).__name__}: {error}. Hooks: {', '.join(sorted(known))}"
    if not trial.get_hookcallers(plugin):
        return "it implements no hook of meshwright; mark its functions with meshwright.hookimpl"
    return None


def implements(plugin: Any, hook: str, manager: pluggy.PluginManager) -> bool:
    return any(caller.name == hook for caller in manager.get_hookcallers(plugin) or ())


def listed(results: list[Any]) -> list[Any]:
    """The specs in what one plugin's `register_strategies` returned."""
    if not results:
        raise TypeError("it returned None, not a list of meshwright.StrategySpec")
    (result,) = results
    if isinstance(result, str) or not isinstance(result, Iterable):
        raise TypeError(f"it returned {result!r}, not a list of meshwright.StrategySpec")
    return list(result)


def call_own(plugin: Any, manager: pluggy.PluginManager, hook: str, **arguments: Any) -> list[Any]:
    """Call one plugin's implementation of a hook, if it has one; its results that are not None."""
    # Of those that have the hook alone: pluggy needs a hash of them, which observers may not have.
    others = [each for _, each in manager.list_name_plugin() if each is not plugin and implements(each, hook, manager)]
    return list(manager.subset_hook_caller(hook, remove_plugins=others)(**arguments))


def spec_defects(spec: Any) -> list[str]:
    """What is missing or wrong in a spec, each as a sentence."""
    if not isinstance(spec, StrategySpec):
        return [f"{spec!r} is a {type(spec).__name__}, not a meshwright.StrategySpec"]
    rules: list[tuple[Callable[[], bool], str]] = [
        (
            lambda: isinstance(spec.name, str) and spec.name.isidentifier() and spec.name == normalized(spec.name),
            f"name {spec.name!r} is not a lower-case identifier",
        ),
        (lambda: isinstance(spec.summary, str) and bool(spec.summary.strip()), "summary is missing"),
        (
            lambda: isinstance(spec.axes, (set, frozenset)) and spec.axes <= set(CLAIMABLE_AXES),
            f"axes {spec.axes!r} are not a set out of {', '.join(CLAIMABLE_AXES)}",
        ),
        (
            lambda: inspect.isclass(spec.config_cls) and issubclass(spec.config_cls, BaseModel),
            f"config_cls {spec.config_cls!r} is not a pydantic model class",
        ),
        (lambda: callable(spec.build), f"build {spec.build!r} is not callable"),
        (lambda: spec.check is None or callable(spec.check), f"check {spec.check!r} is not callable"),
        (
            lambda: not isinstance(spec.aliases, str) and all(alias.strip() for alias in spec.aliases),
            f"aliases {spec.aliases!r} are not a tuple of strings",
        ),
    ]
    return [text for holds, text in rules if not _safely(holds)]


def _safely(rule: Callable[[], bool]) -> bool:
    try:
        return rule()
    except (TypeError, AttributeError):
        # A part of a wholly wrong type (aliases=None) fails the rule; it must not fail the registry.
        return False

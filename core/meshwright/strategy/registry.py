"""Find plugins, record the failures of broken ones, and look up strategies by name. Imports no torch.

[Note: isolation] Each entry point of the group `meshwright` is loaded separately and validated in a separate plugin
manager. A failure is recorded as a `PluginFailure` and reported when strategies are looked up or listed. If two plugins
register the same name, or two strategies claim the same alias, neither gets it: load order must not decide what trains
a model.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, requires
from typing import TYPE_CHECKING, Any

import pluggy
from packaging.requirements import Requirement
from pydantic import BaseModel

from ..base.errors import StrategyError, UnknownStrategyError, suggest_match
from ..base.lazy import format_install_command, format_install_hint
from ..mesh.sizes import CLAIMABLE_AXES
from . import hooks as hookspecs
from .contract import StrategySpec

if TYPE_CHECKING:
    from torch import nn

    from ..model.layout import ModelLayout

ENTRY_POINT_GROUP = "meshwright"
BUILTINS = {"core": EntryPoint("single", "meshwright.single.plugin", ENTRY_POINT_GROUP)}
"""The plugins that are part of core, by their name in errors."""


def normalize_name(name: str) -> str:
    return name.strip().lower().replace("-", "_")


@functools.cache
def find_installable_extras() -> dict[str, str]:
    """Map each strategy of this project to the extra that installs it: the extras that the extra `strategies` lists."""
    try:
        lines = requires("meshwright") or []
    except PackageNotFoundError:
        return {}
    listed = [each for each in map(Requirement, lines) if each.marker and each.marker.evaluate({"extra": "strategies"})]
    return {normalize_name(name): name for each in listed if each.name == "meshwright" for name in sorted(each.extras)}


@dataclass(frozen=True)
class PluginFailure:
    """The reason why a plugin, or one of its strategies, cannot be used."""

    plugin: str
    reason: str
    strategy: str | None = None
    """The strategy that fails; None: the entire plugin."""

    def __str__(self) -> str:
        about = f"{self.strategy} of plugin {self.plugin}" if self.strategy else f"plugin {self.plugin}"
        return f"{about}: {self.reason}"


class Registry:
    """Plugins and their strategies. `builtins` are loaded first; no plugin may replace their strategies."""

    def __init__(
        self, plugins: Iterable[EntryPoint] | None = None, *, builtins: Mapping[str, EntryPoint] = BUILTINS
    ) -> None:
        self._failures: list[PluginFailure] = []
        self._specs: dict[str, StrategySpec] = {}
        self._owners: dict[str, str] = {}
        self._manager = _new_plugin_manager()
        self._builtins = builtins
        for name, builtin in builtins.items():
            self.register(builtin.load(), name=name)
        points = entry_points(group=ENTRY_POINT_GROUP) if plugins is None else plugins
        for entry_point in sorted(set(points), key=lambda point: (point.name, point.value)):
            self._load(entry_point)

    def __repr__(self) -> str:
        return f"Registry({', '.join(self.strategies)})"

    # -- plugins

    def register(self, plugin: Any, *, name: str, strategy: str | None = None) -> None:
        """Add a plugin; errors are recorded in `failures`.

        Args:
            plugin: module or object with hook implementations.
            name: the plugin's name in errors.
            strategy: the strategy that it is expected to register.
        """
        reason = _find_plugin_error(plugin, name)
        if reason is None and self._manager.get_plugin(name) is not None:
            reason = "a plugin of this name is registered already"
        elif reason is None and self._manager.is_registered(plugin):
            reason = f"it is the same module as plugin {self._manager.get_name(plugin)}"
        if reason is not None:
            self.record_failure(PluginFailure(name, reason, strategy))
        else:
            self._manager.register(plugin, name=name)
            self._add_strategies(plugin, name, strategy)

    @contextmanager
    def observing(self, *observers: Any) -> Iterator[None]:
        """Register observers within the context; StrategyError if one is invalid or registered already."""
        for observer in observers:
            reason = _find_plugin_error(observer, type(observer).__name__)
            if self._manager.is_registered(observer):
                reason = "it is registered already"
            if reason is not None:
                raise StrategyError(f"observer {observer!r} cannot be registered: {reason}")
        with ExitStack() as registered:
            for observer in observers:
                self._manager.register(observer)
                registered.callback(self._manager.unregister, observer)
            yield

    @property
    def hook(self) -> Any:
        """Callers of the hooks of `meshwright.strategy.hooks` on all plugins."""
        return self._manager.hook

    def find_implementations(self, hook: str) -> list[tuple[str, Callable[..., list[Any]]]]:
        """Return the name of each plugin that implements a hook, and a function that calls only that implementation."""
        return [
            (name, functools.partial(self._call_plugin, plugin, hook))
            for name, plugin in self._manager.list_name_plugin()
            if plugin is not None and self._implements(plugin, hook)
        ]

    def record_failure(self, failure: PluginFailure) -> None:
        self._failures.append(failure)

    def _load(self, entry_point: EntryPoint) -> None:
        distribution = entry_point.dist.name if entry_point.dist is not None else entry_point.value
        name, strategy = f"{entry_point.name} ({distribution})", normalize_name(entry_point.name)
        try:
            plugin = entry_point.load()
        except (Exception, SystemExit) as error:
            # A plugin's import can fail in any way.
            self.record_failure(PluginFailure(name, f"{type(error).__name__}: {error}", strategy))
        else:
            self.register(plugin, name=name, strategy=strategy)

    def _implements(self, plugin: Any, hook: str) -> bool:
        return any(caller.name == hook for caller in self._manager.get_hookcallers(plugin) or ())

    def _call_plugin(self, plugin: Any, hook: str, **arguments: Any) -> list[Any]:
        """Call one plugin's implementation of a hook; return its results that are not None."""
        # Remove only plugins that have the hook: pluggy hashes them, and observers may not be hashable.
        others = [
            each for _, each in self._manager.list_name_plugin() if each is not plugin and self._implements(each, hook)
        ]
        return list(self._manager.subset_hook_caller(hook, remove_plugins=others)(**arguments))

    # -- strategies

    def _add_strategies(self, plugin: Any, owner: str, expected: str | None) -> None:
        if not self._implements(plugin, "register_strategies"):
            return
        try:
            specs = _unpack_specs(self._call_plugin(plugin, "register_strategies"))
        except (Exception, SystemExit) as error:
            reason = f"register_strategies failed: {type(error).__name__}: {error}"
            self.record_failure(PluginFailure(owner, reason, expected))
            return
        for spec in specs:
            defects = _find_spec_errors(spec)
            if defects:
                has_name = isinstance(spec, StrategySpec) and isinstance(spec.name, str)
                self.record_failure(
                    PluginFailure(owner, "; ".join(defects), normalize_name(spec.name) if has_name else expected)
                )
            else:
                self._add_strategy(spec, owner)

    def _add_strategy(self, spec: StrategySpec, owner: str) -> None:
        other = self._owners.get(spec.name)
        if other is None:
            self._specs[spec.name], self._owners[spec.name] = spec, owner
        elif other in self._builtins:
            self.record_failure(PluginFailure(owner, f"the name {spec.name!r} belongs to core", spec.name))
        else:
            # The owner's entry stays, so that a third plugin is rejected too.
            self._specs.pop(spec.name, None)
            for one, two in ((owner, other), (other, owner)):
                self.record_failure(
                    PluginFailure(one, f"also registered by plugin {two}; uninstall one of them", spec.name)
                )

    @property
    def failures(self) -> list[PluginFailure]:
        """Plugins, strategies and aliases that cannot be used, with reasons."""
        failures = [*self._failures]
        for alias, names in self._collect_aliases().items():
            for name in names:
                if self._is_known_name(alias):
                    reason = f"its alias {alias!r} is the name of another strategy"
                elif len(names) > 1:
                    others = ", ".join(each for each in names if each != name)
                    reason = f"its alias {alias!r} is claimed by {others} too"
                else:
                    continue
                failures.append(PluginFailure(self._owners[name], reason, name))
        return failures

    def _collect_aliases(self) -> dict[str, list[str]]:
        claimed: dict[str, list[str]] = {}
        for spec in self.strategies.values():
            for alias in dict.fromkeys(map(normalize_name, spec.aliases)):
                if alias != spec.name:
                    claimed.setdefault(alias, []).append(spec.name)
        return claimed

    def _is_known_name(self, key: str) -> bool:
        return key in self._specs or any(failure.strategy == key for failure in self._failures)

    @property
    def strategies(self) -> dict[str, StrategySpec]:
        """The usable strategies, sorted by name."""
        return dict(sorted(self._specs.items()))

    def get_owner(self, name: str) -> str:
        """Return the plugin that registered strategy `name`."""
        return self._owners[name]

    @property
    def install_commands(self) -> dict[str, str]:
        """The install command of each strategy of this project that is neither installed nor broken."""
        return {
            name: format_install_command(extra)
            for name, extra in sorted(find_installable_extras().items())
            if not self._is_known_name(name)
        }

    def get(self, name: str) -> StrategySpec:
        """Look up a strategy by name or alias.

        Raises:
            UnknownStrategyError: no such strategy is installed.
            StrategyError: the strategy is broken, or several strategies claim the alias.
        """
        key = normalize_name(name)
        if key in self._specs:
            return self._specs[key]
        broken = [failure for failure in self._failures if failure.strategy == key]
        if broken:
            reasons = "\n".join(f"  {failure}" for failure in broken)
            raise StrategyError(f"strategy {name!r} cannot be used:\n{reasons}\n{self._format_alternatives()}")
        aliases = self._collect_aliases()
        claimants = aliases.get(key, [])
        if len(claimants) > 1:
            raise StrategyError(f"{name!r} is an alias of {' and of '.join(claimants)}. Use one of these names.")
        if claimants:
            return self._specs[claimants[0]]
        if key in find_installable_extras():
            raise UnknownStrategyError(
                f"strategy {name!r} is not installed. {format_install_hint(find_installable_extras()[key])}\n"
                f"{self._format_alternatives()}"
            )
        hint = suggest_match(key, [*self._specs, *find_installable_extras()]) or suggest_match(key, aliases)
        raise UnknownStrategyError(f"strategy {name!r} is not installed.{hint}\n{self._format_alternatives()}")

    def _format_alternatives(self) -> str:
        lines = [f"Installed: {', '.join(self.strategies) or 'none'}."]
        if self.install_commands:
            lines.append(f"Installable: {', '.join(self.install_commands)}.")
        if self._failures:
            lines.append("Failed to load: " + "; ".join(map(str, self._failures)) + ".")
        return "\n".join(lines)


@functools.cache
def get_registry() -> Registry:
    """Return the registry of the installed plugins, built on first use."""
    return Registry()


def get_strategy(name: str) -> StrategySpec:
    """Look up an installed strategy by a name such as "fsdp2", or by an alias; see `Registry.get`."""
    return get_registry().get(name)


def list_strategies() -> dict[str, StrategySpec]:
    """Return the strategies of the installed plugins by name; imports no torch."""
    return get_registry().strategies


def model_layout(model: nn.Module, registry: Registry | None = None) -> ModelLayout:
    """Return the layout of an unsharded model: from a plugin's hook, else inferred from its modules."""
    from ..model.layout import infer_layout

    layout: ModelLayout | None = (registry or get_registry()).hook.model_layout(model=model)
    return layout if layout is not None else infer_layout(model)


# -- plugin validation


def _new_plugin_manager() -> pluggy.PluginManager:
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    return manager


def _find_plugin_error(plugin: Any, name: str) -> str | None:
    """Validate a plugin in a separate plugin manager; see [Note: isolation]."""
    trial = _new_plugin_manager()
    try:
        trial.register(plugin, name=name)
        trial.check_pending()
    except (Exception, SystemExit) as error:
        known = [hook for hook in vars(hookspecs) if hasattr(getattr(hookspecs, hook), "meshwright_spec")]
        return f"{type(error).__name__}: {error}. Hooks: {', '.join(sorted(known))}"
    if not trial.get_hookcallers(plugin):
        return "it implements no hook of meshwright; mark its functions with meshwright.hookimpl"
    return None


def _unpack_specs(results: list[Any]) -> list[Any]:
    if not results:
        raise TypeError("it returned None, not a list of meshwright.StrategySpec")
    (result,) = results
    if isinstance(result, str) or not isinstance(result, Iterable):
        raise TypeError(f"it returned {result!r}, not a list of meshwright.StrategySpec")
    return list(result)


def _find_spec_errors(spec: Any) -> list[str]:
    if not isinstance(spec, StrategySpec):
        return [f"{spec!r} is a {type(spec).__name__}, not a meshwright.StrategySpec"]
    name, axes, aliases, config_cls = spec.name, spec.axes, spec.aliases, spec.config_cls
    is_listed = isinstance(aliases, Iterable) and not isinstance(aliases, str)
    rules = {
        f"name {name!r} is not a lower-case identifier": isinstance(name, str)
        and name.isidentifier()
        and name == normalize_name(name),
        "summary is missing": isinstance(spec.summary, str) and bool(spec.summary.strip()),
        f"axes {axes!r} are not a set of names out of {', '.join(CLAIMABLE_AXES)}": isinstance(axes, (set, frozenset))
        and axes <= set(CLAIMABLE_AXES),
        f"config_cls {config_cls!r} is not a pydantic model class": inspect.isclass(config_cls)
        and issubclass(config_cls, BaseModel),
        f"build {spec.build!r} is not callable": callable(spec.build),
        f"check {spec.check!r} is not callable": spec.check is None or callable(spec.check),
        f"aliases {aliases!r} are not a tuple of strings": is_listed
        and all(isinstance(alias, str) and bool(alias.strip()) for alias in aliases),
    }
    return [text for text, holds in rules.items() if not holds]

"""Find plugins, keep the failures of the broken ones, and look strategies up by name.

[Note: isolation] Each entry point of the group `meshwright` is loaded by itself and tried in a plugin manager of its
own first. What fails there (an import error, a misspelt hook, a wrong signature) is kept as a `Failure` and told
when a strategy is looked up or listed; the other plugins go on working. Two plugins that bring one name are both
refused for that name, and an alias that two strategies claim stands for neither, since neither order nor luck may
decide what trains a model.

Listing imports no torch: plugins import it when they build. Source: pluggy, importlib.metadata.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from ..base.errors import StrategyError, UnknownStrategyError, nearest
from .plugins import (
    ENTRY_POINT_GROUP,
    call_own,
    defect_of,
    implements,
    listed,
    new_plugin_manager,
    normalized,
    plugin_name,
    spec_defects,
)
from .spec import StrategySpec

BUILTINS = {"core": EntryPoint("single", "meshwright.single.plugin", ENTRY_POINT_GROUP)}
"""The plugins that are part of core, by their names in errors."""

# The strategies of this project that are packages of their own, and the extra that installs each.
INSTALLABLE = {"ddp": "ddp", "fsdp2": "fsdp2", "megatron_fsdp": "megatron-fsdp", "pipeline": "pipeline"}


@dataclass(frozen=True)
class Failure:
    """Why a plugin, or one strategy of it, cannot be used."""

    plugin: str
    reason: str
    strategy: str | None = None
    """The strategy it concerns; None: the whole plugin."""

    def __str__(self) -> str:
        about = f"{self.strategy} of plugin {self.plugin}" if self.strategy else f"plugin {self.plugin}"
        return f"{about}: {self.reason}"


def install_line(name: str) -> str:
    """The pip line that installs one of the project's own strategies, run in a clone of the project."""
    return f"pip install -c constraints.txt -e '.[{INSTALLABLE[name]}]'"


class Registry:
    """Plugins and the strategies they bring.

    Args:
        plugins: entry points to load; None: those of the installed distributions.
        builtins: those that come before, and whose strategies no other plugin may replace; by name.
    """

    def __init__(
        self, plugins: Iterable[EntryPoint] | None = None, *, builtins: Mapping[str, EntryPoint] = BUILTINS
    ) -> None:
        self._failures: list[Failure] = []
        self._specs: dict[str, StrategySpec] = {}
        self._owners: dict[str, str] = {}
        self._manager = new_plugin_manager()
        self._builtins = builtins
        for name, builtin in builtins.items():
            self.register(builtin.load(), name=name)
        found = entry_points(group=ENTRY_POINT_GROUP) if plugins is None else plugins
        for entry_point in sorted(set(found), key=lambda point: (point.name, point.value)):
            self._load(entry_point)

    # -- plugins

    def register(self, plugin: Any, *, name: str, strategy: str | None = None) -> None:
        """Add a plugin module or object; what is wrong with it is kept in `failures`.

        Args:
            plugin: implements hooks of `meshwright.strategy.hooks`.
            name: how it is called in errors.
            strategy: what it is expected to bring, so that looking that up tells why it cannot be used.
        """
        reason = defect_of(plugin, name) or self._clash(plugin, name)
        if reason is not None:
            self._failures.append(Failure(name, reason, strategy))
            return
        self._manager.register(plugin, name=name)
        self._add_strategies(plugin, name, strategy)

    @contextmanager
    def observing(self, *observers: Any) -> Iterator[None]:
        """Register objects with hook implementations for the duration of a with block.

        Raises:
            StrategyError: an observer has a defect (it is ours or the caller's own, so it is not set aside).
        """
        for observer in observers:
            reason = defect_of(observer, type(observer).__name__)
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
        """Call a hook of `meshwright.strategy.hooks` on all plugins."""
        return self._manager.hook

    def implementations(self, hook: str) -> list[tuple[str, Callable[..., list[Any]]]]:
        """The plugins that implement a hook: the name of each, and a function that calls it there alone."""
        return [
            (name, functools.partial(call_own, plugin, self._manager, hook))
            for name, plugin in self._manager.list_name_plugin()
            if plugin is not None and implements(plugin, hook, self._manager)
        ]

    def set_aside(self, failure: Failure) -> None:
        """Keep why what a plugin brings cannot be used, to be told in `failures`."""
        self._failures.append(failure)

    def _load(self, entry_point: EntryPoint) -> None:
        name, strategy = plugin_name(entry_point), normalized(entry_point.name)
        try:
            plugin = entry_point.load()
        except (Exception, SystemExit) as error:
            # A plugin's import can fail in any way; see [Note: isolation].
            self._failures.append(Failure(name, f"{type(error).__name__}: {error}", strategy))
            return
        self.register(plugin, name=name, strategy=strategy)

    def _clash(self, plugin: Any, name: str) -> str | None:
        if self._manager.get_plugin(name) is not None:
            return "a plugin of this name is registered already"
        if self._manager.is_registered(plugin):
            return f"it is the same module as plugin {self._manager.get_name(plugin)}"
        return None

    # -- strategies

    def _add_strategies(self, plugin: Any, owner: str, expected: str | None) -> None:
        if not implements(plugin, "register_strategies", self._manager):
            return
        try:
            specs = listed(call_own(plugin, self._manager, "register_strategies"))
        except (Exception, SystemExit) as error:
            reason = f"register_strategies failed: {type(error).__name__}: {error}"
            self._failures.append(Failure(owner, reason, expected))
            return
        for spec in specs:
            defects = spec_defects(spec)
            if defects:
                named = isinstance(spec, StrategySpec) and isinstance(spec.name, str)
                label = normalized(spec.name) if named else expected
                self._failures.append(Failure(owner, "; ".join(defects), label))
            else:
                self._add(spec, owner)

    def _add(self, spec: StrategySpec, owner: str) -> None:
        other = self._owners.get(spec.name)
        if other is None:
            self._specs[spec.name] = spec
            self._owners[spec.name] = owner
        elif other in self._builtins:
            self._failures.append(Failure(owner, f"the name {spec.name!r} belongs to core", spec.name))
        else:
            # Both are refused, see [Note: isolation]; the owner's entry stays so that a third is refused too.
            self._specs.pop(spec.name, None)
            for one, two in ((owner, other), (other, owner)):
                reason = f"also registered by plugin {two}; uninstall one of them"
                self._failures.append(Failure(one, reason, spec.name))

    @property
    def failures(self) -> list[Failure]:
        """What cannot be used, and why: plugins, strategies, and aliases that more than one strategy claims."""
        return [*self._failures, *self._alias_failures()]

    def _alias_failures(self) -> Iterator[Failure]:
        for alias, names in self._claimed_aliases().items():
            for name in names:
                if self._is_name(alias):
                    yield Failure(self._owners[name], f"its alias {alias!r} is the name of another strategy", name)
                elif len(names) > 1:
                    others = ", ".join(each for each in names if each != name)
                    yield Failure(self._owners[name], f"its alias {alias!r} is claimed by {others} too", name)

    def _claimed_aliases(self) -> dict[str, list[str]]:
        """The names of the usable strategies that claim each alias."""
        claimed: dict[str, list[str]] = {}
        for spec in self.strategies.values():
            for alias in dict.fromkeys(map(normalized, spec.aliases)):
                if alias != spec.name:
                    claimed.setdefault(alias, []).append(spec.name)
        return claimed

    def _is_name(self, key: str) -> bool:
        """Whether a strategy is called so, be it usable or broken: a name wins over an alias."""
        return key in self._specs or any(failure.strategy == key for failure in self._failures)

    @property
    def strategies(self) -> dict[str, StrategySpec]:
        """The strategies that can be used, sorted by name."""
        return dict(sorted(self._specs.items()))

    def owner(self, name: str) -> str:
        """The plugin that brought strategy `name`."""
        return self._owners[name]

    @property
    def installable(self) -> dict[str, str]:
        """Strategies of this project that are neither installed nor broken, with the line that installs each."""
        return {name: install_line(name) for name in sorted(INSTALLABLE) if not self._is_name(name)}

    def get(self, name: str) -> StrategySpec:
        """Look a strategy up by name or alias.

        Raises:
            StrategyError: a plugin brings it, but it is broken; the text says why.
            UnknownStrategyError: nothing brings it; the text lists what is there, what failed to load and how to
                install it if it is one of the project's own.
        """
        key = normalized(name)
        if key in self._specs:
            return self._specs[key]
        broken = [failure for failure in self._failures if failure.strategy == key]
        if broken:
            reasons = "\n".join(f"  {failure}" for failure in broken)
            raise StrategyError(f"strategy {name!r} cannot be used:\n{reasons}\n{self._others()}")
        aliases = self._claimed_aliases()
        claimants = aliases.get(key, [])
        if len(claimants) > 1:
            raise StrategyError(f"{name!r} is an alias of {' and of '.join(claimants)}. Use one of these names.")
        if claimants:
            return self._specs[claimants[0]]
        if key in INSTALLABLE:
            raise UnknownStrategyError(
                f"strategy {name!r} is not installed. Install it from a clone of meshwright: {install_line(key)}\n"
                f"{self._others()}"
            )
        hint = nearest(key, [*self._specs, *INSTALLABLE]) or nearest(key, aliases)
        raise UnknownStrategyError(f"strategy {name!r} is not installed.{hint}\n{self._others()}")

    def _others(self) -> str:
        lines = [f"Installed: {', '.join(self.strategies) or 'none'}."]
        if self.installable:
            lines.append(f"Installable: {', '.join(self.installable)}.")
        if self._failures:
            lines.append("Failed to load: " + "; ".join(map(str, self._failures)) + ".")
        return "\n".join(lines)


@functools.cache
def get_registry() -> Registry:
    """The registry of the installed plugins, made on first use."""
    return Registry()


def get_strategy(name: str) -> StrategySpec:
    """The strategy of a name such as "fsdp2", or of an alias, among the installed ones; raises as `Registry.get`."""
    return get_registry().get(name)


def list_strategies() -> dict[str, StrategySpec]:
    """The strategies of the installed plugins by name, without their aliases; imports no torch."""
    return get_registry().strategies

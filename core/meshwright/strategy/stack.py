"""Resolve a strategy and sizes to the stack of strategies that together shard every axis, such as pipeline over fsdp2.

Every axis with a degree above 1 must be claimed by the named strategy or by a wrapping strategy. Core does not refer to
any wrapping strategy by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from ..base.errors import ConfigError, MeshError, ReplicateSizeError, suggest_match
from ..base.validation import coerce_config
from ..files.terminal import warn
from ..mesh.sizes import Degrees, MeshSizes
from .contract import StrategyManager, StrategySpec
from .registry import Registry, get_registry, normalize_name

if TYPE_CHECKING:
    from ..mesh.mesh import Mesh


@dataclass(frozen=True)
class StrategyLayer:
    spec: StrategySpec
    config: BaseModel


@dataclass(frozen=True)
class Stack:
    """An inner strategy and the strategies that wrap it, outermost first."""

    inner: StrategyLayer
    wrappers: tuple[StrategyLayer, ...] = ()
    unused: tuple[StrategyLayer, ...] = ()
    """Wrapping strategies that have options but no effect: each of their axes has one rank."""

    def __repr__(self) -> str:
        configs = ", ".join(repr(layer.config) for layer in (*self.wrappers, self.inner))
        return f"Stack({str(self)!r}, {configs})"

    @property
    def claimed_axes(self) -> frozenset[str]:
        return self.inner.spec.axes.union(*(layer.spec.axes for layer in self.wrappers))

    def build(self, mesh: Mesh) -> StrategyManager:
        """Build the manager that runs the full stack on `mesh`; MeshError if no strategy claims one of its axes."""
        unclaimed = [axis for axis in mesh.degrees.active_axes() if axis not in self.claimed_axes]
        if unclaimed:
            raise MeshError(f"{self} does not shard {', '.join(unclaimed)}, but the mesh is {mesh.degrees}.")

        for layer in self.unused:
            if mesh.rank == 0:
                sizes = " and ".join(f"{axis}_size" for axis in sorted(layer.spec.axes))
                warn(f"{type(layer.config).__name__} has no effect here: {sizes} is 1.", stacklevel=2)
        manager = self._build_layers(mesh, [*self.wrappers, self.inner])
        manager.strategy = str(self)
        return manager

    def _build_layers(self, mesh: Mesh, layers: Sequence[StrategyLayer]) -> StrategyManager:
        layer, *within = layers
        inner = [lambda mesh: self._build_layers(mesh, within)] if within else []
        return layer.spec.build(layer.config, mesh, *inner)

    def __str__(self) -> str:
        return " over ".join(layer.spec.name for layer in (*self.wrappers, self.inner))


def find_strategy_name(config: Any, registry: Registry | None = None) -> str:
    """Return the name of the strategy whose config class is, extends or is a base of the class of `config`.

    The exact class is preferred, then subclasses, then the nearest base. ConfigError unless exactly one matches.
    """
    specs = (registry or get_registry()).strategies.values()
    own, *bases = type(config).__mro__
    # Bases are tried last, since a strategy without options may use the base class of all configs.
    matches_by_base = ([spec.name for spec in specs if spec.config_cls is base] for base in bases)
    matches = (
        [spec.name for spec in specs if spec.config_cls is own]
        or [spec.name for spec in specs if issubclass(spec.config_cls, own)]
        or next(filter(None, matches_by_base), [])
    )
    if len(matches) != 1:
        known = ", ".join(f"{spec.config_cls.__name__} ({spec.name})" for spec in specs)
        raise ConfigError(
            f"config is a {type(config).__name__}, which does not determine a strategy. Name the strategy, or give one "
            f"of {known}."
        )
    return matches[0]


def resolve(
    strategy: str | None,
    sizes: MeshSizes,
    world_size: int,
    *,
    config: Mapping[str, Any] | BaseModel | None = None,
    wrapper_config: Mapping[str, Mapping[str, Any]] | None = None,
    registry: Registry | None = None,
) -> tuple[Stack, Degrees]:
    """Return the stack for a strategy, and the degree of every axis.

    Args:
        strategy: name or alias; None: the one that accepts `config`, see `find_strategy_name`. A wrapping strategy
            named here wraps `single`.
        config: options of the named strategy, as a mapping or as its config class.
        wrapper_config: options of wrapping strategies, by name.
        registry: where strategies are looked up; None: the installed plugins.

    Raises:
        StrategyError, ConfigError: the strategy is not installed or broken, or a config is invalid for it.
        MeshError: the sizes do not fill the world, or no strategy claims an axis. The message lists those that could.
    """
    registry = registry or get_registry()
    sizes = coerce_config(MeshSizes, sizes, where="sizes") if isinstance(sizes, Mapping) else sizes
    named = registry.get(find_strategy_name(config, registry) if strategy is None else strategy)
    wrapper_values = {normalize_name(name): values for name, values in (wrapper_config or {}).items()}
    if named.is_wrapper:
        if named.name in wrapper_values:
            raise ConfigError(
                f"wrapper_config holds options for {named.name!r}, which is the named strategy: "
                f"move them to strategy_config."
            )
        stack = Stack(_build_layer(registry.get("single"), {}), (_build_layer(named, config),))
    else:
        stack = Stack(_build_layer(named, config))
    # Claimed axes affect only how data parallelism is split into dp_replicate and dp_shard. So resolving with the
    # stack so far shows which axes still need a wrapper.
    try:
        degrees = _resolve_degrees(sizes, world_size, stack, registry)
        for axis in degrees.active_axes():
            if axis not in stack.claimed_axes:
                stack = _add_wrapper(axis, stack, wrapper_values, degrees, registry)
    except MeshError as error:
        if sizes.dp_replicate_size is None or named.axes >= _DATA_PARALLEL_AXES:
            raise
        raise ReplicateSizeError(str(error)) from None
    for layer in (stack.inner, *stack.wrappers):
        if layer.spec.check is not None:
            layer.spec.check(layer.config, degrees)
    return replace(stack, unused=_find_unused_wrappers(stack, wrapper_values, degrees, registry)), degrees


def _find_unused_wrappers(
    stack: Stack, wrapper_values: Mapping[str, Mapping[str, Any]], degrees: Degrees, registry: Registry
) -> tuple[StrategyLayer, ...]:
    """Return wrapping strategies with options whose axes have one rank each; ConfigError for any other name."""
    wrapping = {spec.name: spec for spec in registry.strategies.values() if spec.is_wrapper}
    names = [name for name in wrapper_values if name not in {layer.spec.name for layer in stack.wrappers}]
    for name in names:
        if name not in wrapping or wrapping[name].axes & {*degrees.active_axes()}:
            raise ConfigError(
                f"wrapper_config holds options for {name!r}, which is not a wrapping strategy of the run ({stack})."
                f"{suggest_match(name, wrapping)} Remove them, or set the size that needs it."
            )
    return tuple(_build_layer(wrapping[name], wrapper_values[name], "wrapper_config") for name in names)


_DATA_PARALLEL_AXES = {"dp_replicate", "dp_shard"}


def _resolve_degrees(sizes: MeshSizes, world_size: int, stack: Stack, registry: Registry) -> Degrees:
    takes_experts = any("ep" in spec.axes for spec in registry.strategies.values() if spec.is_wrapper)
    if sizes.ep_size > 1 and "ep" not in stack.claimed_axes and not takes_experts:
        # Check this first: resolving would check whether ep_size divides an axis that the stack does not shard.
        degrees = sizes.model_copy(update={"ep_size": 1}).resolve(world_size, stack.claimed_axes)
        raise MeshError(_format_unclaimed_axis("ep", stack, replace(degrees, ep=sizes.ep_size), registry))
    return sizes.resolve(world_size, stack.claimed_axes)


def _build_layer(
    spec: StrategySpec, config: Mapping[str, Any] | BaseModel | None, where: str = "strategy_config"
) -> StrategyLayer:
    return StrategyLayer(spec, coerce_config(spec.config_cls, config, where=f"{where} of {spec.name!r}"))


def _add_wrapper(
    axis: str, stack: Stack, wrapper_values: Mapping[str, Mapping[str, Any]], degrees: Degrees, registry: Registry
) -> Stack:
    candidates = [spec for spec in registry.strategies.values() if spec.is_wrapper and axis in spec.axes]
    if len(candidates) > 1:
        names = ", ".join(spec.name for spec in candidates)
        raise MeshError(
            f"{axis}={getattr(degrees, axis)} can be sharded by several wrapping strategies ({names}). "
            f"Name one of them as the strategy, or uninstall the others."
        )
    if not candidates:
        raise MeshError(_format_unclaimed_axis(axis, stack, degrees, registry))
    layer = _build_layer(candidates[0], wrapper_values.get(candidates[0].name, {}), "wrapper_config")
    return replace(stack, wrappers=(layer, *stack.wrappers))


def _format_unclaimed_axis(axis: str, stack: Stack, degrees: Degrees, registry: Registry) -> str:
    claims = ", ".join(axis for axis in degrees.__dataclass_fields__ if axis in stack.claimed_axes) or "no axis"
    lines = [f"{axis}={getattr(degrees, axis)}, but {stack} shards {claims}, and no wrapping strategy shards {axis}."]
    if axis == "ep":
        lines.append(f"{stack} does not shard experts: every rank holds all of them.")
    # The strategy determines which data-parallel axis is used, unless this one already claims the other.
    wanted = (
        _DATA_PARALLEL_AXES if axis in _DATA_PARALLEL_AXES and not _DATA_PARALLEL_AXES & stack.claimed_axes else {axis}
    )
    names = " or ".join(sorted(wanted))
    able = ", ".join(spec.name for spec in registry.strategies.values() if wanted & spec.axes)
    lines.append(
        f"Installed strategies that shard {names}: {able}." if able else f"No installed strategy shards {names}."
    )
    if missing := registry.install_commands.values():
        lines.append("More can be installed from a clone of meshwright: " + "; ".join(missing) + ".")
    if axis == "dp_shard" and "dp_replicate" in stack.claimed_axes:
        lines.append(f"{stack} keeps full copies: leave dp_replicate_size out, or set it to dp_size={degrees.dp}.")
    elif axis in ("dp_shard", "dp_replicate"):
        lines.append("Or start one rank, with dp_size=1.")
    else:
        lines.append(f"Or set {axis}_size=1.")
    return "\n".join(lines)

"""Managers of a model that a test has made itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from meshwright import Mesh, MeshSizes, OptimizerConfig, open_world, optimizer_factory, resolve


def build_empty_manager(
    strategy: str,
    config: Mapping[str, Any] | None = None,
    sizes: Mapping[str, Any] | None = None,
    *,
    wrapper: Mapping[str, Any] | None = None,
) -> Any:
    """Build a manager without a model on the CPU; `wrapper` are options of pipeline."""
    world = open_world("cpu")
    wrapper_config = {"pipeline": dict(wrapper)} if wrapper else None
    stack, degrees = resolve(
        strategy, MeshSizes(**sizes or {}), world.size, config=config or {}, wrapper_config=wrapper_config
    )
    return stack.build(Mesh(degrees, world))


def build_model_manager(
    model: nn.Module,
    strategy: str = "single",
    config: Mapping[str, Any] | None = None,
    sizes: Mapping[str, Any] | None = None,
    *,
    wrapper: Mapping[str, Any] | None = None,
    optimizer: OptimizerConfig | None = None,
) -> Any:
    """Build the manager of `model` on the CPU, with an optimizer if one is given; `wrapper` are options of pipeline."""
    manager = build_empty_manager(strategy, config, sizes, wrapper=wrapper)
    manager.parallelize(model)
    if optimizer is not None:
        manager.build_optimizer(optimizer_factory(optimizer))
    return manager

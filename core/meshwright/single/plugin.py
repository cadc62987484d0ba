"""Plugin of the built-in strategy `single`: one rank, the reference that every other strategy must equal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..strategy.contract import StrategySpec
from ..strategy.hooks import hookimpl
from .config import SingleConfig

if TYPE_CHECKING:
    from ..mesh.mesh import Mesh
    from ..strategy.contract import StrategyManager


def build(config: SingleConfig, mesh: Mesh) -> StrategyManager:
    from .manager import SingleManager

    return SingleManager(config, mesh)


@hookimpl
def register_strategies() -> list[StrategySpec]:
    return [
        StrategySpec(
            name="single",
            summary="One rank, no sharding: the reference that all others must equal.",
            axes=frozenset(),
            config_cls=SingleConfig,
            build=build,
        )
    ]

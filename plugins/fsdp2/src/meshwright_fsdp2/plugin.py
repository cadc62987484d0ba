"""The entry point of the distribution meshwright-fsdp2: what it registers.

It imports no torch before a manager is built.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.strategy.hooks import hookimpl
from meshwright.strategy.spec import StrategySpec

from .config import AXES, FSDP2Config

if TYPE_CHECKING:
    from meshwright.mesh.mesh import Mesh

    from .manager import FSDP2Manager


def build(config: FSDP2Config, mesh: Mesh) -> FSDP2Manager:
    """The manager of `fsdp2` on a mesh.

    Raises:
        MeshError, StrategyError, ConfigError: as `FSDP2Manager`.
    """
    from .manager import FSDP2Manager

    return FSDP2Manager(config, mesh)


@hookimpl
def register_strategies() -> list[StrategySpec]:
    """See `meshwright.strategy.hooks`."""
    return [
        StrategySpec(
            name="fsdp2",
            aliases=("fsdp", "fully_shard"),
            summary="Shards parameters, gradients, optimizer state (torch fully_shard); HSDP; TP, CP and experts.",
            axes=AXES,
            config_cls=FSDP2Config,
            build=build,
        )
    ]

"""The entry point of the distribution meshwright-fsdp2: what it registers, and how much memory it needs.

It imports no torch before a manager is built.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.mesh.sizes import Degrees
from meshwright.strategy.hooks import hookimpl
from meshwright.strategy.spec import Estimate, ModelSize, StrategySpec

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


def estimate(config: FSDP2Config, degrees: Degrees, size: ModelSize) -> Estimate:
    """Bytes on each rank: everything in 1/(dp_shard x cp x tp); in flight, the block in use and the next one, in 1/tp.

    Args:
        config: options, none of which changes this.
        degrees: ranks along each axis.
        size: elements, and bytes of each.
    """
    shards, width = degrees.dp_shard * degrees.cp * degrees.tp, size.bytes_per_element
    trainable = size.trainable * width // shards
    return Estimate(
        parameters=size.parameters * width // shards,
        gradients=trainable,
        optimizer=2 * trainable,
        gathered=2 * size.largest_block * width // degrees.tp,
    )


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
            estimate=estimate,
        )
    ]

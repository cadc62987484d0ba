"""The entry point of the distribution meshwright-megatron-fsdp: what it registers, and how much memory it needs.

It imports neither torch nor NVIDIA's package before a manager is built.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.mesh.sizes import Degrees
from meshwright.strategy.hooks import hookimpl
from meshwright.strategy.spec import Estimate, ModelSize, StrategySpec

from .config import AXES, MegatronFSDPConfig

if TYPE_CHECKING:
    from meshwright.mesh.mesh import Mesh

    from .manager import MegatronFSDPManager


def build(config: MegatronFSDPConfig, mesh: Mesh) -> MegatronFSDPManager:
    """The manager of `megatron_fsdp` on a mesh.

    Raises:
        MeshError, StrategyError: as `MegatronFSDPManager`.
    """
    from .manager import MegatronFSDPManager

    return MegatronFSDPManager(config, mesh)


def estimate(config: MegatronFSDPConfig, degrees: Degrees, size: ModelSize) -> Estimate:
    """Bytes on each rank: what the ZeRO stage divides, in 1/(dp_shard x cp) (optimizer state in 1/(dp x cp) with outer
    sharding); everything in 1/tp.

    Args:
        config: the stage, and whether it shards over dp_replicate, too.
        degrees: ranks along each axis.
        size: elements, and bytes of each.
    """
    stage = config.zero
    shards = (degrees.dp if config.shards_outer else degrees.dp_shard) * degrees.cp
    width = size.bytes_per_element

    def held(elements: int, from_stage: int, ranks: int) -> int:
        return elements * width // degrees.tp // (ranks if stage >= from_stage else 1)

    return Estimate(
        parameters=held(size.parameters, 3, degrees.dp_shard * degrees.cp),
        gradients=held(size.trainable, 2, degrees.dp_shard * degrees.cp),
        optimizer=2 * held(size.trainable, 1, shards),
        gathered=2 * size.largest_block * width // degrees.tp if stage == 3 else 0,
    )


@hookimpl
def register_strategies() -> list[StrategySpec]:
    """See `meshwright.strategy.hooks`."""
    return [
        StrategySpec(
            name="megatron_fsdp",
            aliases=("nvfsdp", "mfsdp"),
            summary="Shards with NVIDIA's Megatron-FSDP, ZeRO 0 to 3; HSDP; tensor and context axes; on a CPU, too.",
            axes=AXES,
            config_cls=MegatronFSDPConfig,
            build=build,
            estimate=estimate,
        )
    ]

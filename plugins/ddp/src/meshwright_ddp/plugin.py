"""The entry point of the distribution meshwright-ddp: what it registers, and how much memory it needs.

It imports no torch before a manager is built.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.mesh.sizes import Degrees
from meshwright.strategy.contract import StrategyManager
from meshwright.strategy.hooks import hookimpl
from meshwright.strategy.spec import Estimate, ModelSize, StrategySpec

from .config import AXES, DDPConfig

if TYPE_CHECKING:
    from meshwright.mesh.mesh import Mesh


def build(config: DDPConfig, mesh: Mesh) -> StrategyManager:
    """The manager of `ddp` on a mesh, or that of `megatron_fsdp` where the config hands over.

    Raises:
        MeshError, StrategyError, ConfigError: as `DDPManager`, or `handover.hand_over`.
    """
    if config.hands_over:
        from .handover import hand_over

        return hand_over(config, mesh)
    from .manager import DDPManager

    return DDPManager(config, mesh)


def estimate(config: DDPConfig, degrees: Degrees, size: ModelSize) -> Estimate | None:
    """Bytes on each rank: whole copies everywhere; None where the config hands over.

    torch's buckets hold gradients a second time unless gradients are views of them.

    Args:
        config: the engine, and what it widens or divides.
        degrees: ranks along each axis.
        size: elements, and bytes of each.
    """
    if config.hands_over:
        return None
    parameters, trainable = size.parameters * size.bytes_per_element, size.trainable * size.bytes_per_element
    if config.engine == "torch":
        return Estimate(parameters, (1 if config.gradient_as_bucket_view else 2) * trainable, 2 * trainable)
    wide = {"float32": 4, "float64": 8}.get(config.reduce_dtype or "", size.bytes_per_element)
    gradients = size.trainable * (4 if config.grad_reduce_in_fp32 else wide)
    if not config.use_distributed_optimizer:
        return Estimate(parameters, gradients, 2 * trainable)
    # Half types have masters in float32, and their state is that of the masters.
    owned = -(-size.trainable * config.num_distributed_optimizer_instances // degrees.dp_replicate)
    per_element = 3 * 4 if size.bytes_per_element < 4 else 2 * size.bytes_per_element
    return Estimate(parameters, gradients, owned * per_element)


@hookimpl
def register_strategies() -> list[StrategySpec]:
    """See `meshwright.strategy.hooks`."""
    return [
        StrategySpec(
            name="ddp",
            aliases=("distributed_data_parallel",),
            summary="Whole copies of the model, gradients summed in buckets; with ZeRO-1.",
            axes=AXES,
            config_cls=DDPConfig,
            build=build,
            estimate=estimate,
        )
    ]

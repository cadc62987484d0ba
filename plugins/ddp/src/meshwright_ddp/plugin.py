"""The entry point of the distribution meshwright-ddp."""

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
    if config.hands_over:
        from .handover import hand_over

        return hand_over(config, mesh)
    from .manager import DDPManager

    return DDPManager(config, mesh)


def estimate(config: DDPConfig, degrees: Degrees, size: ModelSize) -> Estimate | None:
    """Whole copies everywhere. torch's buckets hold gradients a second time unless gradients are views of them."""
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

"""The entry point of the distribution meshwright-ddp."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.contract import Estimate, ModelSize, StrategySpec
from meshwright.hookspecs import hookimpl
from meshwright.sizes import Degrees

from .config import DDPConfig

if TYPE_CHECKING:
    from meshwright.mesh import Mesh

    from .manager import DDPManager


def build(config: DDPConfig, mesh: Mesh) -> DDPManager:
    from .manager import DDPManager

    return DDPManager(config, mesh)


def estimate(config: DDPConfig, degrees: Degrees, size: ModelSize) -> Estimate:
    """Whole copies everywhere; the buckets hold gradients a second time unless gradients are views of them."""
    trainable = size.trainable * size.bytes_per_element
    copies = 1 if config.gradient_as_bucket_view else 2
    return Estimate(size.parameters * size.bytes_per_element, copies * trainable, 2 * trainable)


@hookimpl
def register_strategies() -> list[StrategySpec]:
    return [
        StrategySpec(
            name="ddp",
            aliases=("distributed_data_parallel",),
            summary="Whole copies of the model, gradients summed in buckets (torch DDP).",
            axes=frozenset({"dp_replicate"}),
            config_cls=DDPConfig,
            build=build,
            estimate=estimate,
        )
    ]

"""Entry point of meshwright-ddp. It does not import torch until a manager is built."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.plugin import StrategyError, StrategyManager, StrategySpec, hookimpl

from .config import AXES, DDPConfig

if TYPE_CHECKING:
    from meshwright.plugin import Degrees, Mesh


def build(config: DDPConfig, mesh: Mesh) -> StrategyManager:
    if config.delegates_to_megatron_fsdp:
        from .megatron_fsdp_delegation import delegate_to_megatron_fsdp

        return delegate_to_megatron_fsdp(config, mesh)
    from .manager import DDPManager

    return DDPManager(config, mesh)


def check(config: DDPConfig, degrees: Degrees) -> None:
    if config.delegates_to_megatron_fsdp and degrees.pp > 1:
        raise StrategyError(
            f"use_megatron_fsdp=true hands over to megatron_fsdp, which cannot train one stage of a pipeline, but "
            f"pp_size={degrees.pp}. Set pp_size=1, or leave use_megatron_fsdp out."
        )


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
            check=check,
        )
    ]

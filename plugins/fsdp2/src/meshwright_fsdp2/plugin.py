"""Entry point of meshwright-fsdp2. It does not import torch until a manager is built."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.plugin import StrategySpec, hookimpl

from .config import AXES, FSDP2Config

if TYPE_CHECKING:
    from meshwright.plugin import Mesh

    from .manager import FSDP2Manager


def build(config: FSDP2Config, mesh: Mesh) -> FSDP2Manager:
    from .manager import FSDP2Manager

    return FSDP2Manager(config, mesh)


@hookimpl
def register_strategies() -> list[StrategySpec]:
    return [
        StrategySpec(
            name="fsdp2",
            aliases=("fsdp", "fully_shard", "full_shard", "zero3"),
            summary="Shards parameters, gradients, optimizer state (torch fully_shard); HSDP; TP, CP and experts.",
            axes=AXES,
            config_cls=FSDP2Config,
            build=build,
        )
    ]

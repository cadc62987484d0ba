"""Entry point of meshwright-megatron-fsdp. It does not import torch until a manager is built."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.plugin import StrategyError, StrategySpec, hookimpl

from .config import AXES, MegatronFSDPConfig

if TYPE_CHECKING:
    from meshwright.plugin import Degrees, Mesh

    from .manager import MegatronFSDPManager


def build(config: MegatronFSDPConfig, mesh: Mesh) -> MegatronFSDPManager:
    from .manager import MegatronFSDPManager

    return MegatronFSDPManager(config, mesh)


def check(config: MegatronFSDPConfig, degrees: Degrees) -> None:
    if degrees.pp > 1:
        raise StrategyError(
            f"megatron_fsdp cannot train one stage of a pipeline, but pp_size={degrees.pp}: the package reduces the "
            f"gradients of a whole backward. Set pp_size=1, or use another strategy, such as fsdp2."
        )


@hookimpl
def register_strategies() -> list[StrategySpec]:
    return [
        StrategySpec(
            name="megatron_fsdp",
            aliases=("nvfsdp", "mfsdp"),
            summary="Shards with NVIDIA's Megatron-FSDP, ZeRO 0 to 3; HSDP; tensor and context axes; on a CPU, too.",
            axes=AXES,
            config_cls=MegatronFSDPConfig,
            build=build,
            check=check,
        )
    ]

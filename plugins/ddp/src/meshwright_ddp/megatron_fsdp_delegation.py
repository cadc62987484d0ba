"""Delegate to the strategy `megatron_fsdp` through the registry, so that neither package imports the other."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from meshwright.plugin import (
    Mesh,
    MeshError,
    MeshSizes,
    StrategyError,
    StrategyManager,
    UnknownStrategyError,
    get_strategy,
    validate_config,
)

from .config import DDPConfig

TARGET = "megatron_fsdp"

# ZeRO stage of each value of data_parallel_sharding_strategy.
_ZERO_STAGES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
_INSTANCES_OPTION = "num_distributed_optimizer_instances"
# Options that are translated here.
_TRANSLATED_OPTIONS = (
    "use_megatron_fsdp",
    "use_custom_fsdp",
    "engine",
    "data_parallel_sharding_strategy",
    "use_distributed_optimizer",
    _INSTANCES_OPTION,
)


def delegate_to_megatron_fsdp(config: DDPConfig, mesh: Mesh) -> StrategyManager:
    """Build the manager of `megatron_fsdp` with all options, over the same ranks.

    Each option keeps its value, including defaults, which may differ from megatron_fsdp's. Overlap is enabled if the
    ZeRO stage requires it, as in Megatron-Core. Instances of the distributed optimizer become ranks along dp_replicate.
    """
    try:
        spec = get_strategy(TARGET)
    except UnknownStrategyError as error:
        raise StrategyError(
            f"use_megatron_fsdp=true hands over to the strategy {TARGET}, which is not installed. Install the extra "
            f"meshwright[megatron-fsdp], or leave use_megatron_fsdp out.\n{error}"
        ) from None
    if mesh.world.group is not None:
        raise StrategyError(
            f"{TARGET}, to which use_megatron_fsdp hands over, cannot train one stage of a pipeline. Set pp_size=1."
        )
    options = _build_options(config, spec.config_cls)
    ranks, instances = mesh.degrees.dp, config.num_distributed_optimizer_instances
    if ranks % instances:
        raise MeshError(
            f"{_INSTANCES_OPTION}={instances} does not divide the {ranks} data-parallel ranks. Use a divisor."
        )
    if instances == 1 and config.outer_dp_sharding_strategy != "no_shard":
        raise StrategyError(
            f"outer_dp_sharding_strategy={config.outer_dp_sharding_strategy} shards over instances of the distributed "
            f"optimizer, of which there is one. Set {_INSTANCES_OPTION} to a divisor of the {ranks} data-parallel "
            "ranks, or leave outer_dp_sharding_strategy out."
        )
    degrees = MeshSizes(dp_size=ranks, dp_replicate_size=instances).resolve(mesh.world.size, spec.axes)
    target_config = validate_config(spec.config_cls, options, where=f"options of {TARGET!r}")
    return spec.build(target_config, Mesh(degrees, mesh.world))


def _build_options(config: DDPConfig, config_cls: type[BaseModel]) -> dict[str, Any]:
    stage = _ZERO_STAGES[config.data_parallel_sharding_strategy]
    if config.use_distributed_optimizer and stage == 0:
        raise StrategyError(
            "use_distributed_optimizer=true shards the optimizer's state, but data_parallel_sharding_strategy=no_shard "
            "does not. Set data_parallel_sharding_strategy to optim or more, or leave use_distributed_optimizer out."
        )
    for name in config.non_default_options:
        if name not in (*_TRANSLATED_OPTIONS, *config_cls.model_fields):
            raise StrategyError(
                f"{name}={getattr(config, name)} is no option of {TARGET}, to which use_megatron_fsdp hands over. "
                f"Leave it out."
            )
    options = {name: value for name, value in config.to_dict().items() if name in config_cls.model_fields}
    options.pop("data_parallel_sharding_strategy", None)
    return {
        **options,
        "overlap_grad_reduce": config.overlap_grad_reduce or stage > 1,
        "overlap_param_gather": config.overlap_param_gather or stage in (0, 3),
        "zero_dp_strategy": stage,
    }

"""Hand the work over to the strategy `megatron_fsdp`, which is a package of its own.

It is found through the registry, so that neither package imports the other.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from meshwright.base.errors import MeshError, StrategyError, UnknownStrategyError
from meshwright.base.validation import validated
from meshwright.mesh.mesh import Mesh
from meshwright.mesh.sizes import MeshSizes
from meshwright.strategy.contract import StrategyManager
from meshwright.strategy.registry import get_strategy

from .config import DDPConfig

TARGET = "megatron_fsdp"

# The values of data_parallel_sharding_strategy are its stages.
_STAGES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
_INSTANCES = "num_distributed_optimizer_instances"
# Of these, all but the engine are heeded here.
_OWN = (
    "use_megatron_fsdp",
    "use_custom_fsdp",
    "engine",
    "data_parallel_sharding_strategy",
    "use_distributed_optimizer",
    _INSTANCES,
)


def hand_over(config: DDPConfig, mesh: Mesh) -> StrategyManager:
    """The manager of `megatron_fsdp` with all options, over the same ranks.

    Each is handed over as it stands, also where it has our default, which need not be theirs. Where a stage cannot but
    overlap, it does so whatever the option says, as in Megatron-Core.

    Instances of the distributed optimizer are its ranks along dp_replicate: each shards over the ranks of its own.

    Args:
        config: with `use_megatron_fsdp`.
        mesh: whose data-parallel ranks are shared out anew.

    Raises:
        StrategyError: it is not installed, or does not know an option that was set (on all ranks alike).
        MeshError: the ranks cannot be divided so.
        ConfigError: it refuses a value.
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
    options = _options(config, spec.config_cls)
    instances = config.num_distributed_optimizer_instances
    _check_instances(config, mesh.degrees.dp)
    degrees = MeshSizes(dp_size=mesh.degrees.dp, dp_replicate_size=instances).resolve(mesh.world.size, spec.axes)
    theirs_config = validated(spec.config_cls, options, where=f"options of {TARGET!r}")
    return spec.build(theirs_config, Mesh(degrees, mesh.world))


def _options(config: DDPConfig, theirs: type[BaseModel]) -> dict[str, Any]:
    """Values of the other strategy's options.

    Raises:
        StrategyError: it does not know an option that differs from its default.
    """
    stage = _STAGES[config.data_parallel_sharding_strategy]
    if config.use_distributed_optimizer and stage == 0:
        raise StrategyError(
            "use_distributed_optimizer=true shards the optimizer's state, but data_parallel_sharding_strategy=no_shard "
            "does not. Set data_parallel_sharding_strategy to optim or more, or leave use_distributed_optimizer out."
        )
    for name in config.changed:
        if name not in (*_OWN, *theirs.model_fields):
            raise StrategyError(
                f"{name}={getattr(config, name)} is no option of {TARGET}, to which use_megatron_fsdp hands over. "
                f"Leave it out."
            )
    options = {name: value for name, value in config.to_dict().items() if name in theirs.model_fields}
    options.pop("data_parallel_sharding_strategy", None)
    overlaps = {
        "overlap_grad_reduce": config.overlap_grad_reduce or stage > 1,
        "overlap_param_gather": config.overlap_param_gather or stage in (0, 3),
    }
    return {**options, **overlaps, "zero_dp_strategy": stage}


def _check_instances(config: DDPConfig, ranks: int) -> None:
    instances, outer = config.num_distributed_optimizer_instances, config.outer_dp_sharding_strategy
    if ranks % instances:
        raise MeshError(f"{_INSTANCES}={instances} does not divide the {ranks} data-parallel ranks. Use a divisor.")
    if instances == 1 and outer != "no_shard":
        raise StrategyError(
            f"outer_dp_sharding_strategy={outer} shards over instances of the distributed optimizer, of which there is "
            f"one. Set {_INSTANCES} to a divisor of the {ranks} data-parallel ranks, or leave "
            f"outer_dp_sharding_strategy out."
        )

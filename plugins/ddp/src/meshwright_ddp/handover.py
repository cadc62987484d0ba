"""Hand the work over to the strategy `megatron_fsdp`, which is a package of its own.

It is found through the registry, so that neither package imports the other.
"""

from __future__ import annotations

from typing import Any

from meshwright.contract import StrategyManager
from meshwright.errors import StrategyError, UnknownStrategyError
from meshwright.mesh import Mesh
from meshwright.registry import get_strategy
from meshwright.sizes import MeshSizes
from meshwright.validation import validated

from .config import DDPConfig

TARGET = "megatron_fsdp"

# The values of data_parallel_sharding_strategy are its stages.
_STAGES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
_RENAMED = {"data_parallel_sharding_strategy": "zero_dp_strategy"}
_OWN = ("use_megatron_fsdp", "use_custom_fsdp", "engine")


def hand_over(config: DDPConfig, mesh: Mesh) -> StrategyManager:
    """The manager of `megatron_fsdp` with the same options, over the same ranks.

    Raises:
        StrategyError: it is not installed, or does not know an option that was set (on all ranks alike).
        ConfigError: it refuses a value.
    """
    try:
        spec = get_strategy(TARGET)
    except UnknownStrategyError as error:
        raise StrategyError(
            f"use_megatron_fsdp=true hands over to the strategy {TARGET}, which is not installed. Install the extra "
            f"meshwright[megatron-fsdp], or leave use_megatron_fsdp out.\n{error}"
        ) from None
    options: dict[str, Any] = {}
    for name in config.changed:
        if name in _OWN:
            continue
        theirs = _RENAMED.get(name, name)
        if theirs not in spec.config_cls.model_fields:
            raise StrategyError(
                f"{name}={getattr(config, name)} is no option of {TARGET}, to which use_megatron_fsdp hands over. "
                f"Leave it out."
            )
        options[theirs] = _STAGES[config.data_parallel_sharding_strategy] if theirs != name else getattr(config, name)
    # Our default is not theirs.
    options.setdefault("zero_dp_strategy", _STAGES[config.data_parallel_sharding_strategy])
    degrees = MeshSizes(dp_size=mesh.degrees.dp).resolve(mesh.world.size, spec.axes)
    theirs_config = validated(spec.config_cls, options, where=f"options of {TARGET!r}")
    return spec.build(theirs_config, Mesh(degrees, mesh.world))

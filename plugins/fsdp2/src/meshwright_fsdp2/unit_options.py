"""The arguments of torch's `fully_shard` for each unit of a model, from a config.

The output dtype of a policy is the whole model's: on each block it would cast the residual stream back and forth. Under
autocast it is that of the residual stream, too; see [Note: wide stream] in `forward`.
Source: torch.distributed.fsdp.fully_shard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Shard

from meshwright.plugin import Mesh, ModelError, StrategyError, TensorParallel, get_packed_dim, instantiate

from .config import FSDP2Config
from .units import FSDPUnit

_PlacementFn: TypeAlias = "Callable[[nn.Parameter], Shard | None]"


# -- the policies of a config, as torch's objects


def build_mixed_precision_policy(config: FSDP2Config) -> MixedPrecisionPolicy:
    """Return the policy of the root: the config's `mp_policy`, with its `reduce_dtype`."""
    policy = _instantiate_policy(config.mp_policy, MixedPrecisionPolicy) or MixedPrecisionPolicy()
    sums = find_accumulation_dtype(config)
    return policy if sums is None else replace(policy, reduce_dtype=getattr(torch, sums))


def find_accumulation_dtype(config: FSDP2Config) -> str | None:
    """Return the dtype in which gradients are summed: `reduce_dtype`, except bfloat16, in which they only travel."""
    return "float32" if config.reduce_dtype == "bfloat16" else config.reduce_dtype


def build_offload_policy(config: FSDP2Config, device: torch.device) -> OffloadPolicy:
    """Return the offload policy of all units on a mesh of this device."""
    policy = _instantiate_policy(config.offload_policy, CPUOffloadPolicy)
    if policy is not None and policy.pin_memory and device.type == "cpu":
        raise StrategyError(
            "offload_policy has pin_memory=True, but the mesh is on the CPU, where there is no accelerator to pin "
            "memory for. Use offload_policy={pin_memory: false}, or leave it out: parameters are in CPU memory anyway."
        )
    return policy or OffloadPolicy()


def _instantiate_policy(value: Any, expected: type) -> Any:
    return instantiate(value, expected=expected) if isinstance(value, Mapping) else value


def _find_residual_dtype(config: FSDP2Config) -> torch.dtype | None:
    output = build_mixed_precision_policy(config).output_dtype
    if config.autocast_dtype is None or output is None:
        return None
    return output if output.itemsize > getattr(torch, config.autocast_dtype).itemsize else None


@dataclass(frozen=True)
class UnitOptions:
    """How the units of one model are sharded."""

    mesh: DeviceMesh
    mp_policy: MixedPrecisionPolicy
    offload_policy: OffloadPolicy
    reshard_after_forward: bool | int | None = None
    expert_mesh: DeviceMesh | None = None
    reduces_in_bfloat16: bool = False
    residual_dtype: torch.dtype | None = None

    @classmethod
    def from_config(cls, config: FSDP2Config, mesh: Mesh) -> UnitOptions:
        shard = "dp_shard_cp" if mesh.degrees.cp > 1 else "dp_shard"
        copies = mesh.degrees.dp_replicate > 1
        experts = None
        if mesh.degrees.ep > 1:
            experts = mesh.expert_mesh["dp_replicate", "ep_shard"] if copies else mesh.expert_mesh["ep_shard"]
        return cls(
            mesh["dp_replicate", shard] if copies else mesh[shard],
            build_mixed_precision_policy(config),
            build_offload_policy(config, mesh.device),
            config.reshard_after_forward,
            experts,
            config.reduce_dtype == "bfloat16",
            _find_residual_dtype(config),
        )

    @property
    def is_offloading(self) -> bool:
        return isinstance(self.offload_policy, CPUOffloadPolicy)

    def fully_shard_kwargs(self, unit: FSDPUnit, tensor_parallel: TensorParallel | None) -> dict[str, Any]:
        """Return the arguments of `fully_shard` for one unit, without `ignored_params`."""
        if unit.is_experts and self.expert_mesh is not None:
            mesh = self.expert_mesh
            place: _PlacementFn | None = _build_expert_placement_fn(mesh.shape[-1])
        else:
            mesh = self.mesh
            place = _build_packed_placement_fn(mesh.shape[-1]) if tensor_parallel is not None else None
        return {
            "mesh": mesh,
            "reshard_after_forward": self._unit_reshard_after_forward(unit, mesh.shape[-1]),
            "mp_policy": self.unit_mp_policy(unit),
            "offload_policy": self.offload_policy,
            "shard_placement_fn": place,
        }

    def unit_mp_policy(self, unit: FSDPUnit) -> MixedPrecisionPolicy:
        policy = self.mp_policy
        if unit.dtype is not None:
            # Kept as they are, and summed in `reduce_dtype` where that is no coarser.
            sums = policy.reduce_dtype
            if sums is not None and torch.promote_types(sums, unit.dtype) != sums:
                sums = None
            return MixedPrecisionPolicy(reduce_dtype=sums, cast_forward_inputs=False)
        if unit.is_root:
            return policy
        if unit.is_experts:
            # The block around them has cast their inputs.
            return replace(policy, output_dtype=None, cast_forward_inputs=False)
        if self.residual_dtype is not None:
            # Inputs keep their dtype; autocast casts the operands of products.
            return replace(
                policy, output_dtype=self.residual_dtype if unit.is_block else None, cast_forward_inputs=False
            )
        return replace(policy, output_dtype=None)

    def _unit_reshard_after_forward(self, unit: FSDPUnit, shards: int) -> bool | int:
        reshard = not unit.is_last if self.reshard_after_forward is None else self.reshard_after_forward
        if unit.is_experts and not isinstance(reshard, bool) and reshard >= shards:
            # A number of ranks is that of `dp_shard`; experts may have fewer, which then all keep them.
            return True
        return reshard


def _build_packed_placement_fn(shards: int) -> _PlacementFn:
    """Shard the first dim, but another one where tensor parallelism has sharded packed parts along the first."""

    def place(parameter: nn.Parameter) -> Shard | None:
        if get_packed_dim(parameter) != 0:
            return None
        divided = [dim for dim in range(1, parameter.dim()) if parameter.shape[dim] % shards == 0]
        if not divided:
            raise ModelError(
                f"a parameter of shape {tuple(parameter.shape)} holds packed parts that tensor parallelism has sharded "
                f"along the first dim, and dp_shard={shards} divides no other. Choose a dp_shard that does, or name "
                f"it replicate in a tp_plan."
            )
        return Shard(divided[0])

    return place


def _build_expert_placement_fn(shards: int) -> _PlacementFn:
    """Shard the first dim, that of experts, or another one where each rank of `ep` has too few experts."""

    def place(parameter: nn.Parameter) -> Shard | None:
        local = parameter.to_local().shape if isinstance(parameter, DTensor) else parameter.shape
        return next((Shard(dim) for dim, size in enumerate(local) if size % shards == 0), None)

    return place

"""The arguments of torch's `fully_shard` for each unit of a model, from a config.

The policy's output dtype applies to the full model; on each block it would cast the residual stream back and forth.
Under autocast it is also the dtype of the residual stream; see [Note: wide residual stream] in `forward_wrappers`.
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


# -- the policies of a config, as torch objects


def build_mixed_precision_policy(config: FSDP2Config) -> MixedPrecisionPolicy:
    """Return the root's policy: the config's `mp_policy` with its `reduce_dtype`."""
    policy = _instantiate_policy(config.mp_policy, MixedPrecisionPolicy) or MixedPrecisionPolicy()
    accumulation_dtype = find_accumulation_dtype(config)
    return policy if accumulation_dtype is None else replace(policy, reduce_dtype=getattr(torch, accumulation_dtype))


def find_accumulation_dtype(config: FSDP2Config) -> str | None:
    """Return the dtype in which gradients are summed: `reduce_dtype`, but float32 for bfloat16, which is only sent."""
    return "float32" if config.reduce_dtype == "bfloat16" else config.reduce_dtype


def build_offload_policy(config: FSDP2Config, device: torch.device) -> OffloadPolicy:
    """Return the offload policy of all units."""
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
    """The mesh and policies with which the units of one model are sharded."""

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
        is_replicated = mesh.degrees.dp_replicate > 1
        expert_mesh = None
        if mesh.degrees.ep > 1:
            expert_mesh = (
                mesh.expert_mesh["dp_replicate", "ep_shard"] if is_replicated else mesh.expert_mesh["ep_shard"]
            )
        return cls(
            mesh["dp_replicate", shard] if is_replicated else mesh[shard],
            build_mixed_precision_policy(config),
            build_offload_policy(config, mesh.device),
            config.reshard_after_forward,
            expert_mesh,
            config.reduce_dtype == "bfloat16",
            _find_residual_dtype(config),
        )

    @property
    def is_offloading(self) -> bool:
        return isinstance(self.offload_policy, CPUOffloadPolicy)

    def fully_shard_kwargs(self, unit: FSDPUnit, tensor_parallel: TensorParallel | None) -> dict[str, Any]:
        """Return the arguments of `fully_shard` for one unit, except `ignored_params`."""
        if unit.is_experts and self.expert_mesh is not None:
            mesh = self.expert_mesh
            shard_placement_fn: _PlacementFn | None = _build_expert_placement_fn(mesh.shape[-1])
        else:
            mesh = self.mesh
            shard_placement_fn = _build_packed_placement_fn(mesh.shape[-1]) if tensor_parallel is not None else None
        return {
            "mesh": mesh,
            "reshard_after_forward": self._unit_reshard_after_forward(unit, mesh.shape[-1]),
            "mp_policy": self.unit_mp_policy(unit),
            "offload_policy": self.offload_policy,
            "shard_placement_fn": shard_placement_fn,
        }

    def unit_mp_policy(self, unit: FSDPUnit) -> MixedPrecisionPolicy:
        policy = self.mp_policy
        if unit.dtype is not None:
            # Parameters keep their dtype; gradients are summed in `reduce_dtype` if that is at least as precise.
            reduce_dtype = policy.reduce_dtype
            if reduce_dtype is not None and torch.promote_types(reduce_dtype, unit.dtype) != reduce_dtype:
                reduce_dtype = None
            return MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False)
        if unit.is_root:
            return policy
        if unit.is_experts:
            # The block that contains the experts has cast their inputs.
            return replace(policy, output_dtype=None, cast_forward_inputs=False)
        if self.residual_dtype is not None:
            # Inputs keep their dtype; autocast casts the operands of matrix products.
            return replace(
                policy, output_dtype=self.residual_dtype if unit.is_block else None, cast_forward_inputs=False
            )
        return replace(policy, output_dtype=None)

    def _unit_reshard_after_forward(self, unit: FSDPUnit, shards: int) -> bool | int:
        reshard = not unit.is_last if self.reshard_after_forward is None else self.reshard_after_forward
        if unit.is_experts and not isinstance(reshard, bool) and reshard >= shards:
            # The number of ranks refers to `dp_shard`. Experts may have fewer, which then all keep the parameters.
            return True
        return reshard


def _build_packed_placement_fn(shards: int) -> _PlacementFn:
    """Shard dim 0, or another dim if tensor parallelism has sharded packed parts along dim 0."""

    def place(parameter: nn.Parameter) -> Shard | None:
        if get_packed_dim(parameter) != 0:
            return None
        divisible_dims = [dim for dim in range(1, parameter.dim()) if parameter.shape[dim] % shards == 0]
        if not divisible_dims:
            raise ModelError(
                f"a parameter of shape {tuple(parameter.shape)} holds packed parts that tensor parallelism has sharded "
                f"along the first dim, and dp_shard={shards} divides no other. Choose a dp_shard that does, or name "
                f"it replicate in a tp_plan."
            )
        return Shard(divisible_dims[0])

    return place


def _build_expert_placement_fn(shards: int) -> _PlacementFn:
    """Shard dim 0, that of experts, or another dim if each rank of `ep` has too few experts."""

    def place(parameter: nn.Parameter) -> Shard | None:
        local = parameter.to_local().shape if isinstance(parameter, DTensor) else parameter.shape
        return next((Shard(dim) for dim, size in enumerate(local) if size % shards == 0), None)

    return place

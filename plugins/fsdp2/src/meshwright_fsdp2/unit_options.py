"""What each unit of a model is sharded with: the arguments of torch's `fully_shard`.

Options come here once, whole, and each unit asks for its own. Which modules are units is `units`' affair, and calling
`fully_shard` is `sharding`'s.
Source: torch.distributed.fsdp.fully_shard.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Shard

from meshwright.base.errors import ModelError
from meshwright.mesh.mesh import Mesh
from meshwright.parallel.tensor import TensorParallel, packed_dim

from .config import FSDP2Config
from .policies import mixed_precision, of_blocks, of_dtype, of_experts, offload, stream_dtype
from .units import Unit

_Placement: TypeAlias = "Callable[[nn.Parameter], Shard | None]"


@dataclass(frozen=True)
class UnitOptions:
    """How the units of one model are sharded.

    Attributes:
        mesh: one axis to shard over, or (replicate, shard).
        mp_policy: of the root; other units get what follows from it.
        offload_policy: of all units.
        reshard_after_forward: as in FSDP2Config.
        expert_mesh: where experts are sharded, one axis of the expert mesh or (replicate, shard); None: there are none.
        sends_halves: whether gradients travel in bfloat16.
        stream: dtype of the residual stream; see `policies.stream_dtype`.
    """

    mesh: DeviceMesh
    mp_policy: MixedPrecisionPolicy
    offload_policy: OffloadPolicy
    reshard_after_forward: bool | int | None = None
    expert_mesh: DeviceMesh | None = None
    sends_halves: bool = False
    stream: torch.dtype | None = None

    @classmethod
    def of_config(cls, config: FSDP2Config, mesh: Mesh) -> UnitOptions:
        """What a config says, on a mesh.

        Args:
            config: with the options that act on units.
            mesh: experts have a mesh of their own where its `ep` has 2 or more ranks.

        Raises:
            ConfigError: a policy cannot be made.
            StrategyError: the offload policy pins memory, where there is no accelerator to pin it for.
        """
        shard = "dp_shard_cp" if mesh.degrees.cp > 1 else "dp_shard"
        copies = mesh.degrees.dp_replicate > 1
        experts = None
        if mesh.degrees.ep > 1:
            experts = mesh.expert_mesh["dp_replicate", "ep_shard"] if copies else mesh.expert_mesh["ep_shard"]
        return cls(
            mesh["dp_replicate", shard] if copies else mesh[shard],
            mixed_precision(config),
            offload(config, mesh.device),
            config.reshard_after_forward,
            experts,
            config.reduce_dtype == "bfloat16",
            stream_dtype(config),
        )

    @property
    def offloads(self) -> bool:
        """Whether shards lie in CPU memory."""
        return isinstance(self.offload_policy, CPUOffloadPolicy)

    def arguments(self, unit: Unit, tensor_parallel: TensorParallel | None) -> dict[str, Any]:
        """The arguments of `fully_shard` for one unit, but for the parameters that it leaves out.

        Args:
            unit: of `find_units`, or split off it by `units_by_dtype`.
            tensor_parallel: what has been applied to the model along `tp`.

        Returns:
            Among them `shard_placement_fn`, which raises ModelError where no dim of a parameter can be sharded.
        """
        if unit.is_experts and self.expert_mesh is not None:
            mesh = self.expert_mesh
            place: _Placement | None = _place_experts(mesh.shape[-1])
        else:
            mesh = self.mesh
            place = _place_packed(mesh.shape[-1], tensor_parallel) if tensor_parallel is not None else None
        return {
            "mesh": mesh,
            "reshard_after_forward": self._reshard(unit, mesh.shape[-1]),
            "mp_policy": self._policy(unit),
            "offload_policy": self.offload_policy,
            "shard_placement_fn": place,
        }

    def _reshard(self, unit: Unit, shards: int) -> bool | int:
        reshard = not unit.is_last if self.reshard_after_forward is None else self.reshard_after_forward
        if unit.is_experts and not isinstance(reshard, bool) and reshard >= shards:
            # A number of ranks is that of `dp_shard`; experts may have fewer, which then all keep them.
            return True
        return reshard

    def _policy(self, unit: Unit) -> MixedPrecisionPolicy:
        if unit.dtype is not None:
            return of_dtype(self.mp_policy, unit.dtype)
        if unit.is_experts:
            return of_experts(self.mp_policy)
        if unit.is_root:
            return self.mp_policy
        policy = of_blocks(self.mp_policy, self.stream)
        return replace(policy, output_dtype=self.stream) if unit.is_block else policy


def _place_packed(shards: int, tensor_parallel: TensorParallel) -> _Placement:
    """Along the first dim, but for packed parts that tensor parallelism has sharded there: along another."""

    def place(parameter: nn.Parameter) -> Shard | None:
        packed = packed_dim(parameter)
        if packed != 0:
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


def _place_experts(shards: int) -> _Placement:
    """Along the first dim, that of experts; where each rank of `ep` has too few, along another that can be divided."""

    def place(parameter: nn.Parameter) -> Shard | None:
        local = parameter.to_local().shape if isinstance(parameter, DTensor) else parameter.shape
        return next((Shard(dim) for dim, size in enumerate(local) if size % shards == 0), None)

    return place

"""Conversion between Megatron-FSDP's shards and full tensors, for states, checkpoints and norms.

The package concatenates a unit's parameters in one buffer and splits it into equal shards, so a rank may hold all rows
of a parameter, some or none. Under tensor parallelism the buffer contains this rank's `tp` shards of the parameters.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.plugin import (
    LocalChunk,
    ParameterSharding,
    ShardGroups,
    ShardLayout,
    gather_full_tensor,
    get_flat_range_chunks,
    get_local_chunks,
)

from ._compat.wrapped_model import ShardRange


class MegatronShardLayout(ShardLayout):
    """Shards of a parameter, or of a tensor of its shape (a gradient, optimizer state); see `ShardLayout`."""

    def __init__(
        self,
        shard_ranges: Mapping[nn.Parameter, ShardRange],
        divisions: Mapping[nn.Parameter, ParameterSharding] | None = None,
    ) -> None:
        self._shard_ranges: Mapping[Tensor, ShardRange] = dict(shard_ranges)
        self._divisions: Mapping[Tensor, ParameterSharding] = dict(divisions or {})

    def gather(self, value: Tensor, parameter: Tensor) -> Tensor:
        slot = self._shard_ranges.get(parameter)
        if slot is None or not isinstance(value, DTensor):
            return gather_full_tensor(value)
        local = value.to_local()
        if slot.group is None:
            part = local.view(parameter.shape)
        else:
            flat = local.new_zeros(parameter.shape.numel())
            flat[slot.start : slot.end] = local.flatten()
            dist.all_reduce(flat, group=slot.group)
            part = flat.view(parameter.shape)
        division = self._divisions.get(parameter)
        return part if division is None else division.gather(part)

    def shard(self, full: Tensor, parameter: Tensor) -> Tensor:
        """Copy this rank's elements into a DTensor like the parameter, in `full`'s dtype. No communication."""
        slot = self._shard_ranges.get(parameter)
        if (
            slot is None
            or not isinstance(parameter, DTensor)
            or self.get_full_shape(parameter, parameter) != full.shape
        ):
            return full
        division = self._divisions.get(parameter)
        part = full if division is None else division.shard(full)
        # A copy, so that optimizer state does not keep the full tensor's memory alive.
        local = part.flatten()[slot.start : slot.end].clone().view(parameter.detach().to_local().shape)
        return build_dtensor_like(parameter, local)

    def get_full_shape(self, value: Tensor, parameter: Tensor) -> torch.Size:
        """Return the parameter's shape before tensor parallelism if `value` has its current shape; else `value`'s."""
        division = self._divisions.get(parameter)
        return division.shape if division is not None and value.shape == parameter.shape else value.shape

    def allocate_shard(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        if not isinstance(parameter, DTensor):
            return super().allocate_shard(parameter, dtype)
        return build_dtensor_like(parameter, torch.empty_like(parameter.detach().to_local(), dtype=dtype))

    def get_local_chunks(self, value: Tensor, parameter: Tensor) -> list[LocalChunk]:
        slot = self._shard_ranges.get(parameter)
        if slot is None or not isinstance(value, DTensor):
            return get_local_chunks(value)
        local = value.detach().to_local()
        if slot.group is None:
            chunks = get_local_chunks(local.view(parameter.shape))
        else:
            chunks = get_flat_range_chunks(local.flatten(), slot.start, parameter.shape)
        division = self._divisions.get(parameter)
        return chunks if division is None else division.to_global_chunks(chunks, parameter.shape)

    def find_compute_dtype(self, parameter: Tensor) -> torch.dtype:
        """Return the dtype in which modules compute with a parameter; its trained copy may have another dtype."""
        slot = self._shard_ranges.get(parameter)
        return parameter.dtype if slot is None else slot.dtype

    def get_shard_groups(self, parameter: Tensor) -> ShardGroups:
        """Return the group that shards the parameter's buffer, and the group of `tp`, if each shards it."""
        slot, division = self._shard_ranges[parameter], self._divisions.get(parameter)
        along_dp = (slot.group,) if slot.group is not None else ()
        along_tp = (division.mesh.get_group(),) if division is not None and division.is_sharded else ()
        return along_dp + along_tp


def build_dtensor_like(parameter: DTensor, local_tensor: Tensor) -> DTensor:
    """Build a DTensor with the parameter's mesh, placements and shape from a local tensor of any dtype."""
    return DTensor.from_local(
        local_tensor,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )

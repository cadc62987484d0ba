"""The distributed optimizer: each rank steps its own shard of every parameter.

The user's optimizer runs over shards instead of parameters. A shard is the range of a flattened parameter that this
rank owns, 1-D and possibly empty, under the parameter's name. Half-precision parameters have float32 master shards,
from which they are rounded after each step; shards of other parameters are views of them. So elementwise optimizers
(Adam, AdamW, SGD, Adagrad ...) give the same results on shards as on parameters.
Source: Rajbhandari et al. 2020, arXiv:1910.02054 (ZeRO stage 1); Megatron-Core's distributed optimizer, for ownership.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.plugin import (
    ChunkedTensor,
    Gradients,
    LocalChunk,
    Mesh,
    ShardLayout,
    StrategyError,
    copy_all,
    get_flat_range_chunks,
)
from meshwright.plugin import ShardGroups as NormGroups

from .buckets import ParamAndGradBuffer
from .collectives import DataParallelGroups

HALF_DTYPES = (torch.float16, torch.bfloat16)


@dataclass(eq=False)
class OptimizerShard:
    """This rank's shard of one parameter: elements `start` to `end` of it, flattened."""

    name: str
    parameter: nn.Parameter
    start: int
    end: int
    optimizer_parameter: nn.Parameter
    gradient: Tensor

    @property
    def model_values(self) -> Tensor:
        """The owned range of the parameter: a view, (end - start,), in its dtype."""
        return self.parameter.detach().view(-1)[self.start : self.end]

    @property
    def is_master(self) -> bool:
        """Whether `optimizer_parameter` is a float32 copy of the parameter's values."""
        return self.optimizer_parameter.dtype != self.parameter.dtype

    def set_gradient(self) -> None:
        self.optimizer_parameter.grad = self.gradient.to(self.optimizer_parameter.dtype)


class OptimizerShardLayout(ShardLayout):
    """This rank's shards of all trainable parameters, in registration order.

    As a `ShardLayout` it also describes optimizer state: tensors with the shape of a shard are sharded like the shard;
    other values, such as step counters, are equal on all ranks.
    """

    def __init__(self, buffers: Sequence[ParamAndGradBuffer], groups: DataParallelGroups) -> None:
        self.group = groups.shard
        shard_by_model_index = {
            order: _build_shard(buffer, index, groups.rank)
            for buffer in buffers
            for index, order in enumerate(buffer.model_indices)
        }
        self._shards = [shard_by_model_index[order] for order in sorted(shard_by_model_index)]
        self._masters = [shard for shard in self._shards if shard.is_master]
        self._shard_by_optimizer_parameter = {shard.optimizer_parameter: shard for shard in self._shards}
        self._optimizer_parameter_by_parameter = {shard.parameter: shard.optimizer_parameter for shard in self._shards}

    def __iter__(self) -> Iterator[OptimizerShard]:
        return iter(self._shards)

    def __getitem__(self, trained: nn.Parameter) -> OptimizerShard:
        """Return the shard whose `optimizer_parameter` is `trained`."""
        return self._shard_by_optimizer_parameter[trained]

    def find_optimizer_parameter(self, parameter: nn.Parameter) -> nn.Parameter:
        return self._optimizer_parameter_by_parameter[parameter]

    def copy_model_to_masters(self) -> None:
        copy_all(
            [shard.optimizer_parameter.detach() for shard in self._masters],
            [shard.model_values for shard in self._masters],
        )

    def copy_masters_to_model(self) -> None:
        """Round the master shards into the owned ranges of the parameters."""
        copy_all(
            [shard.model_values for shard in self._masters],
            [shard.optimizer_parameter.detach() for shard in self._masters],
        )

    # -- state, see `ShardLayout`

    def gather(self, value: Tensor, parameter: Tensor) -> Tensor:
        """Gather a tensor with the shape of a shard into the parameter's shape, in `value`'s dtype. Collective."""
        shard = self._find_shard(value, parameter)
        if shard is None:
            return value
        flat = torch.zeros(shard.parameter.numel(), dtype=value.dtype, device=shard.parameter.device)
        flat[shard.start : shard.end] = value
        # Each element has one owner; other ranks add zeros.
        dist.all_reduce(flat, group=self.group)
        return flat.view(shard.parameter.shape)

    def shard(self, full: Tensor, parameter: Tensor) -> Tensor:
        """Copy the shard's range of a tensor with the parameter's shape, 1-D. No communication."""
        shard = self._shard_by_optimizer_parameter.get(parameter)
        if shard is None or full.shape != shard.parameter.shape:
            return full
        if full.dim() == 0:
            raise StrategyError(
                f"{shard.name} has no dimensions, so its optimizer state cannot be distinguished from counters of "
                "steps. Give it the shape (1,), or set use_distributed_optimizer=false."
            )
        return full.reshape(-1)[shard.start : shard.end].clone()

    def get_local_chunks(self, value: Tensor, parameter: Tensor) -> list[LocalChunk]:
        """Return rectangular chunks of the parameter's shape, at most 2 x dims - 1 of them, as views."""
        shard = self._find_shard(value, parameter)
        if shard is None:
            return super().get_local_chunks(value, parameter)
        return get_flat_range_chunks(value, shard.start, shard.parameter.shape)

    def get_full_shape(self, value: Tensor, parameter: Tensor) -> torch.Size:
        shard = self._find_shard(value, parameter)
        return value.shape if shard is None else shard.parameter.shape

    def _find_shard(self, value: Tensor, parameter: Tensor) -> OptimizerShard | None:
        shard = self._shard_by_optimizer_parameter.get(parameter)
        return shard if shard is not None and value.shape == shard.optimizer_parameter.shape else None

    # -- masters: float32 values of half-precision parameters

    def sharded_masters(self) -> dict[str, ChunkedTensor]:
        return {
            shard.name: ChunkedTensor(
                shard.parameter.shape,
                shard.optimizer_parameter.dtype,
                tuple(self.get_local_chunks(shard.optimizer_parameter, shard.optimizer_parameter)),
            )
            for shard in self._masters
        }

    def copy_masters(self, *, full: bool) -> dict[str, Tensor]:
        """Return copies of the masters by name. If `full`: unsharded, on the CPU, and collective."""
        return {
            shard.name: self.gather(shard.optimizer_parameter.detach(), shard.optimizer_parameter).cpu()
            if full
            else shard.optimizer_parameter.detach().clone()
            for shard in self._masters
        }

    def load_masters(self, values: Mapping[str, Tensor], *, full: bool, group: dist.ProcessGroup | None) -> None:
        """Load the result of `copy_masters`; parameters without a value use the model's. Collective if `full`.

        If `full`, rank 0 of `group` has the values, in the parameters' shapes; otherwise they are this rank's 1-D
        shards.
        """
        self.copy_model_to_masters()
        names = [list(values)]
        if full:
            dist.broadcast_object_list(names, group=group, group_src=0)
        for shard in self._masters:
            if shard.name not in names[0]:
                continue
            value = values.get(shard.name)
            if full:
                received = torch.empty_like(shard.parameter, dtype=shard.optimizer_parameter.dtype)
                if value is not None:
                    received.copy_(value)
                dist.broadcast(received, group=group, group_src=0)
                value = self.shard(received, shard.optimizer_parameter)
            if value is not None:
                shard.optimizer_parameter.data.copy_(value)


def _build_shard(buffer: ParamAndGradBuffer, index: int, rank: int) -> OptimizerShard:
    parameter = buffer.parameters[index]
    start, end = buffer.layout.owned_param_range(index, rank)
    values = parameter.detach().view(-1)[start:end]
    if parameter.dtype in HALF_DTYPES:
        values = values.float()
    gradient = buffer.grad_view(index).view(-1)[start:end]
    return OptimizerShard(buffer.names[index], parameter, start, end, nn.Parameter(values), gradient)


class ShardGradients(Gradients):
    """Gradients of shards, with the norm of the full gradients; see `Gradients`."""

    def __init__(self, shards: OptimizerShardLayout, mesh: Mesh, *, use_float64: bool) -> None:
        super().__init__(lambda: (shard.optimizer_parameter for shard in shards), shards, mesh, use_float64=use_float64)
        self._shards = shards

    def get_shard_groups(self, parameter: nn.Parameter) -> NormGroups:
        return (self._shards.group,)

    # -- copies of a parameter on several pipeline stages, which own different ranges of it

    def get_optimizer_parameter(self, parameter: nn.Parameter) -> nn.Parameter:
        return self._shards.find_optimizer_parameter(parameter)

    def get_local_gradient(self, trained: nn.Parameter) -> Tensor:
        """Return a shard's gradient in its range of the flattened parameter, and zeros elsewhere."""
        shard = self._shards[trained]
        flat = torch.zeros(shard.parameter.numel(), dtype=trained.dtype, device=trained.device)
        if trained.grad is not None:
            flat[shard.start : shard.end] = trained.grad
        return flat

    def set_summed_gradient(self, trained: nn.Parameter, total: Tensor) -> None:
        shard = self._shards[trained]
        dist.all_reduce(total, group=self._shards.group)
        trained.grad = total[shard.start : shard.end].clone()

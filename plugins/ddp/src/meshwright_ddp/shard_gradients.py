"""The gradients that the distributed optimizer steps: 1-D stretches, of which ranks own different ones.

Their norm is that of the whole gradients. Reduction is in `reduction`, what is stepped in `optimizer`.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.manager.gradients import Gradients
from meshwright.mesh.mesh import Mesh
from meshwright.tensors.norms import total_grad_norm

from .optimizer import Shards


class ShardGradients(Gradients):
    """See `Gradients`; what is trained are shards."""

    def __init__(self, shards: Shards, mesh: Mesh, *, wide: bool) -> None:
        super().__init__(lambda: (shard.tensor for shard in shards), shards, mesh, wide=wide)
        self._shards = shards

    def total_norm(self, norm_type: float, *, without: Collection[nn.Parameter] = ()) -> Tensor:
        left_out = set(without)
        gradients = [p.grad for p in self._trainable() if p.grad is not None and p not in left_out]
        norm = total_grad_norm(gradients, norm_type, wide=self._wide, device=self._mesh.device)
        if math.isinf(norm_type):
            dist.all_reduce(norm, op=dist.ReduceOp.MAX, group=self._shards.group)
            return norm
        power = norm**norm_type
        dist.all_reduce(power, group=self._shards.group)
        return power ** (1.0 / norm_type)

    # -- copies of a parameter on several stages of a pipeline, which own different stretches of it

    def trained_as(self, parameter: nn.Parameter) -> nn.Parameter:
        return self._shards.tensor_of(parameter)

    def copy_of(self, trained: nn.Parameter) -> Tensor:
        """The gradient of a shard at its place in the flattened parameter, and zeros elsewhere."""
        shard = self._shards[trained]
        flat = torch.zeros(shard.parameter.numel(), dtype=trained.dtype, device=trained.device)
        if trained.grad is not None:
            flat[shard.start : shard.end] = trained.grad
        return flat

    def take_sum(self, trained: nn.Parameter, total: Tensor) -> None:
        shard = self._shards[trained]
        dist.all_reduce(total, group=self._shards.group)
        trained.grad = total[shard.start : shard.end].clone()

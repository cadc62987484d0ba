"""The gradients that the distributed optimizer steps: 1-D stretches, of which ranks own different ones.

Their norm is that of the whole gradients. Reduction is in `reduction`, what is stepped in `optimizer`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.manager.gradients import Gradients
from meshwright.mesh.mesh import Mesh
from meshwright.tensors.norms import Groups

from .optimizer import Shards


class ShardGradients(Gradients):
    """See `Gradients`; what is trained are shards."""

    def __init__(self, shards: Shards, mesh: Mesh, *, wide: bool) -> None:
        super().__init__(lambda: (shard.tensor for shard in shards), shards, mesh, wide=wide)
        self._shards = shards

    def groups_of(self, parameter: nn.Parameter) -> Groups:
        return (self._shards.group,)

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

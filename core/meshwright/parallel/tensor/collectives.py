"""The collectives of tensor parallelism as autograd functions.

A *replicated* tensor is equal on all ranks of the group, and so is its gradient. A *partial* tensor has a different
summand on each rank.
Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3 (`Copy` and `Reduce` are its f and g); Korthikanti et al. 2022,
arXiv:2205.05198, section 4.2 (the sequence-parallel pair).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from ..._compat.torch import all_gather, all_reduce, all_to_all, reduce_scatter
from ...step.row_statistics import Vocabulary


def chunk_sizes(size: int, count: int) -> list[int]:
    """Return the chunk sizes of `torch.chunk`, and so of `Shard`, for `count` ranks; the last ones may be 0."""
    step = -(-size // count)
    return [max(0, min(step, size - rank * step)) for rank in range(count)]


class Copy(torch.autograd.Function):
    """Pass a replicated tensor to sharded layers: identity. Backward all-reduces the partial gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad, "sum", ctx.group), None


class Reduce(torch.autograd.Function):
    """All-reduce a partial tensor. Backward passes the replicated gradient through."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        return all_reduce(tensor, "sum", group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Split(torch.autograd.Function):
    """Return this rank's chunk of a replicated tensor along `dim`. Backward gathers the gradients of all chunks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.size, ctx.group = dim, tensor.shape[dim], group
        return _get_local_chunk(tensor, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return gather_uneven(grad, ctx.dim, ctx.size, ctx.group), None, None


class Gather(torch.autograd.Function):
    """Gather a sharded tensor to `size` entries along `dim`. Backward returns this rank's chunk of the gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, size: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return gather_uneven(tensor, dim, size, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _get_local_chunk(grad, ctx.dim, ctx.group), None, None, None


class GatherWithPartialGrad(torch.autograd.Function):
    """Gather a sharded tensor for sharded layers. Backward reduce-scatters the partial gradients.

    Args:
        gathered: the gathered tensor, if it exists already. None: gather it.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, gathered: Tensor | None, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        if gathered is not None:
            return gathered.view_as(gathered)
        return all_gather(tensor, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return reduce_scatter(grad, ctx.dim, ctx.group), None, None, None


class ReduceScatter(torch.autograd.Function):
    """Reduce-scatter a partial tensor. Backward gathers the gradients of all chunks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return reduce_scatter(tensor, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(grad, ctx.dim, ctx.group), None, None


class AllToAll(torch.autograd.Function):
    """Send `sends[r]` entries of the first dim to each rank r, and receive `receives[r]`. None: equal splits."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sends: list[int] | None, receives: list[int] | None, group: dist.ProcessGroup
    ) -> Tensor:
        ctx.sends, ctx.receives, ctx.group = sends, receives, group
        return all_to_all(rows, group, sends, receives)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return all_to_all(grad, ctx.group, ctx.receives, ctx.sends), None, None, None


def gather_uneven(tensor: Tensor, dim: int, size: int, group: dist.ProcessGroup) -> Tensor:
    """Gather all ranks' chunks along `dim`, to `size` entries. Chunks may be uneven. Not differentiable."""
    sizes = chunk_sizes(size, dist.get_world_size(group))
    if len(set(sizes)) == 1:
        return all_gather(tensor, dim, group)
    dim %= tensor.dim()
    missing = sizes[0] - tensor.shape[dim]
    padded = F.pad(tensor, [0, 0] * (tensor.dim() - 1 - dim) + [0, missing]) if missing else tensor
    gathered = all_gather(padded, dim, group)
    return torch.cat([gathered.narrow(dim, rank * sizes[0], size) for rank, size in enumerate(sizes)], dim)


def _get_local_chunk(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    sizes = chunk_sizes(tensor.shape[dim], dist.get_world_size(group))
    rank = dist.get_rank(group)
    return tensor.narrow(dim, sum(sizes[:rank]), sizes[rank]).contiguous()


@dataclass(frozen=True)
class ShardedVocabulary(Vocabulary):
    """A vocabulary of `num_entries`, sharded over `group`. `start` is this rank's first entry."""

    num_entries: int
    group: dist.ProcessGroup
    start: int = 0

    @classmethod
    def from_group(cls, group: dist.ProcessGroup, num_entries: int) -> ShardedVocabulary:
        """Return this rank's shard."""
        sizes = chunk_sizes(num_entries, dist.get_world_size(group))
        return cls(num_entries, group, sum(sizes[: dist.get_rank(group)]))

    def full_size(self, local_size: int) -> int:
        return self.num_entries

    def gather_stacked(self, local: Tensor) -> Tensor:
        return all_gather(local[None], 0, self.group)

    def gather_logits(self, logits: Tensor) -> Tensor:
        return gather_uneven(logits, -1, self.num_entries, self.group)

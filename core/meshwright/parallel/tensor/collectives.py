"""The collectives of tensor parallelism as autograd functions, each with the backward that its use calls for.

A *replicated* tensor is equal on all ranks of the group, and so is its gradient. A *partial* one is to be summed over
them. Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3 (copy and reduce are its f and g); Korthikanti et al.
2022, arXiv:2205.05198, section 4.2 (the sequence-parallel pair).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from ..._compat.torch import all_gather, all_reduce, reduce_scatter


def chunk_sizes(size: int, count: int) -> list[int]:
    """How `torch.chunk`, and so `Shard`, cuts `size` for `count` ranks; the last ones may be shorter, or empty."""
    step = -(-size // count)
    return [max(0, min(step, size - rank * step)) for rank in range(count)]


class Copy(torch.autograd.Function):
    """Replicated tensor that is used in parts: identity; the partial gradients are summed."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad, "sum", ctx.group), None


class Reduce(torch.autograd.Function):
    """Partial tensor to its sum; the gradient, replicated, passes."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        return all_reduce(tensor, "sum", group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Split(torch.autograd.Function):
    """This rank's chunk of a replicated tensor along `dim`; the gradients of all chunks are gathered."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.size, ctx.group = dim, tensor.shape[dim], group
        return _own(tensor, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return gather(grad, ctx.dim, ctx.size, ctx.group), None, None


class Gather(torch.autograd.Function):
    """All chunks of a sharded tensor, `size` long in all; of the gradient, replicated, this rank's chunk passes."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, size: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return gather(tensor, dim, size, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _own(grad, ctx.dim, ctx.group), None, None, None


class GatherForParts(torch.autograd.Function):
    """`Gather` of what is then used in parts: the partial gradients are summed and scattered.

    Args:
        whole: the gathered tensor, if it is there already; None to gather.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, whole: Tensor | None, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        if whole is not None:
            return whole.view_as(whole)
        return all_gather(tensor, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return reduce_scatter(grad, ctx.dim, ctx.group), None, None, None


class ReduceScatter(torch.autograd.Function):
    """Partial tensor to this rank's chunk of its sum; the gradients of all chunks are gathered."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return reduce_scatter(tensor, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(grad, ctx.dim, ctx.group), None, None


class Copies:
    """One `Copy` for each tensor, however many layers read it.

    Query, key and value read the same tensor; with one copy their gradients are summed locally before the all-reduce.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._pairs: list[tuple[Tensor, Tensor]] = []

    def __len__(self) -> int:
        return len(self._pairs)

    def of(self, tensor: Tensor) -> Tensor:
        """The copy of a tensor."""
        for seen, copied in self._pairs:
            if seen is tensor:
                return copied
        made: Tensor = Copy.apply(tensor, self._group)
        self.add(tensor, made)
        return made

    def add(self, tensor: Tensor, copied: Tensor) -> None:
        """Tell the copy of a tensor, where another gradient rule than that of `Copy` holds."""
        self._pairs.append((tensor, copied))

    def forget(self, count: int) -> None:
        """Keep the first `count` only."""
        del self._pairs[count:]


def gather(tensor: Tensor, dim: int, size: int, group: dist.ProcessGroup) -> Tensor:
    """All ranks' chunks along `dim`, which has `size` entries in all and need not divide; without autograd."""
    sizes = chunk_sizes(size, dist.get_world_size(group))
    if len(set(sizes)) == 1:
        return all_gather(tensor, dim, group)
    dim %= tensor.dim()
    missing = sizes[0] - tensor.shape[dim]
    padded = F.pad(tensor, [0, 0] * (tensor.dim() - 1 - dim) + [0, missing]) if missing else tensor
    return _without_padding(all_gather(padded, dim, group), dim, sizes)


def _without_padding(tensor: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    step = sizes[0]
    return torch.cat([tensor.narrow(dim, rank * step, size) for rank, size in enumerate(sizes)], dim)


def _own(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    sizes = chunk_sizes(tensor.shape[dim], dist.get_world_size(group))
    rank = dist.get_rank(group)
    return tensor.narrow(dim, sum(sizes[:rank]), sizes[rank]).contiguous()

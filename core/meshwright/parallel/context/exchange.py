"""The collectives of context parallelism as autograd functions.

Shapes: B sequences, H heads, S positions of all ranks, P = S / n of this rank, D features of a head.
Source: for `exchange_heads`, Jacobs et al. 2023, arXiv:2309.14509.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..._compat.torch import all_gather, all_to_all, reduce_scatter
from .positions import Share, divided, put_together


class GatherPositions(torch.autograd.Function):
    """All positions of a tensor of which each rank has its own along `dim`, such as (B, H, P, D) to (B, H, S, D).

    Each rank makes something of its own of the whole, so gradients are summed, and scattered.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup, dim: int = 2) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return put_together(all_gather(part[None], 0, group), dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        parts = divided(grad, ctx.dim, dist.get_world_size(ctx.group))
        return reduce_scatter(parts, 0, ctx.group)[0], None, None


def joined_positions(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(B, P, ...) to (B, S, ...), on all ranks, with a gradient if it is of floating point."""
    if part.is_floating_point():
        whole: Tensor = GatherPositions.apply(part, group, 1)
        return whole
    # A bool travels as a byte.
    return put_together(all_gather(part.to(torch.uint8)[None], 0, group), 1).to(part.dtype)


def of_last_tokens(part_BK: Tensor, real_BP: Tensor, share: Share) -> Tensor:
    """Of what each rank has of each sequence, that of the rank with the last real token, on all ranks, with a gradient.

    Args:
        part_BK: what this rank has, (B, K).
        real_BP: which of its tokens are no padding, bool.
    """
    positions_P = share.own(torch.arange(share.size * real_BP.shape[1], device=part_BK.device)[None])[0]
    every_RB = all_gather(positions_P.where(real_BP, -1).amax(1)[None], 0, share.group)
    # Of the two pieces that a rank has of anything, the second is its own here.
    pieces = joined_positions(torch.stack([torch.zeros_like(part_BK), part_BK], 1), share.group)
    second_B = 2 * share.size - 1 - every_RB.argmax(0)
    return pieces[torch.arange(len(part_BK), device=part_BK.device), second_B]


class AllToAll(torch.autograd.Function):
    """Give each rank of the group its entry along the first dim; what comes from rank r is entry r."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return all_to_all(parts, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_to_all(grad, ctx.group), None


def heads_for_positions(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """From all heads of this rank's positions to this rank's heads of all: (B, H, P, D) to (B, H/n, S, D)."""
    by_rank = torch.stack(part.chunk(dist.get_world_size(group), 1))
    return put_together(AllToAll.apply(by_rank, group), 2)


def positions_for_heads(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The way back, of an output that has positions before heads: (B, S, H/n, D) to (B, P, H, D)."""
    received = AllToAll.apply(divided(part, 1, dist.get_world_size(group)), group)
    return torch.cat(received.unbind(0), 2)

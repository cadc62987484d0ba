"""Which rank has which positions, and the collectives that exchange them.

A sequence is cut into 2n chunks for n ranks, and rank r has the chunks r and 2n - 1 - r: under a causal mask an early
chunk attends to few positions and a late one to many, so all ranks have equal work.

Shapes: B sequences, H heads, S positions of all ranks, P = S / n of this rank, D features of a head.
Source: Dubey et al. 2024, arXiv:2407.21783, section 3.3.2; Jacobs et al. 2023, arXiv:2309.14509, for `AllToAll`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ..._compat.torch import all_gather, all_to_all, reduce_scatter

Way = Literal["allgather", "ulysses"]


@dataclass(frozen=True)
class Share:
    """This rank's share of each sequence: its place on the axis `cp`, and how positions are exchanged."""

    group: dist.ProcessGroup
    size: int
    rank: int
    way: Way

    def positions(self, length: int, device: torch.device | None = None) -> Tensor:
        """Return this rank's positions of a sequence, whose length 2 x `size` divides; int64."""
        return local_part(torch.arange(length, device=device), 0, self.rank, self.size)

    def starts(self, length: int) -> tuple[int, int]:
        """Return the first positions of this rank's two chunks."""
        chunk = length // (2 * self.size)
        return self.rank * chunk, (2 * self.size - 1 - self.rank) * chunk

    def own(self, whole: Tensor) -> Tensor:
        """Return this rank's positions of a tensor (B, S, ...)."""
        return local_part(whole, 1, self.rank, self.size)


def local_part(whole: Tensor, dim: int, rank: int, ranks: int) -> Tensor:
    """Return a rank's positions of a tensor that has all of them along `dim`."""
    chunks = whole.chunk(2 * ranks, dim)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]], dim)


def put_together(parts: Sequence[Tensor] | Tensor, dim: int) -> Tensor:
    """Return all positions in order along `dim`, from the parts of all ranks."""
    halves = [part.chunk(2, dim) for part in parts]
    return torch.cat([first for first, _ in halves] + [last for _, last in reversed(halves)], dim)


def divided(whole: Tensor, dim: int, ranks: int) -> Tensor:
    """Return the parts of all ranks, stacked along a new first dim."""
    return torch.stack([local_part(whole, dim, rank, ranks) for rank in range(ranks)])


class GatherPositions(torch.autograd.Function):
    """Gather the positions of all ranks along `dim`, such as (B, H, P, D) to (B, H, S, D); gradients are summed."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup, dim: int = 2) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return put_together(all_gather(part[None], 0, group), dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        parts = divided(grad, ctx.dim, dist.get_world_size(ctx.group))
        return reduce_scatter(parts, 0, ctx.group)[0], None, None


class AllToAll(torch.autograd.Function):
    """Send each rank of the group its entry along the first dim; entry r of the result comes from rank r."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return all_to_all(parts, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_to_all(grad, ctx.group), None


def joined_positions(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather (B, P, ...) to (B, S, ...) on all ranks, with a gradient if it is floating point."""
    if part.is_floating_point():
        whole: Tensor = GatherPositions.apply(part, group, 1)
        return whole
    # A bool is sent as a byte.
    return put_together(all_gather(part.to(torch.uint8)[None], 0, group), 1).to(part.dtype)


def of_last_tokens(part_BK: Tensor, real_BP: Tensor, share: Share) -> Tensor:
    """Return for each sequence what the rank with its last token (padding aside) has, on all ranks, with a gradient.

    Args:
        part_BK: what this rank has of each sequence, (B, K).
        real_BP: which of its tokens are no padding, bool.
    """
    positions_P = share.positions(share.size * real_BP.shape[1], part_BK.device)
    every_RB = all_gather(positions_P.where(real_BP, -1).amax(1)[None], 0, share.group)
    # A rank has two pieces of each sequence; the value is put into the second one.
    pieces = joined_positions(torch.stack([torch.zeros_like(part_BK), part_BK], 1), share.group)
    second_B = 2 * share.size - 1 - every_RB.argmax(0)
    return pieces[torch.arange(len(part_BK), device=part_BK.device), second_B]


def heads_for_positions(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange all heads of this rank's positions for this rank's heads of all: (B, H, P, D) to (B, H/n, S, D)."""
    by_rank = torch.stack(part.chunk(dist.get_world_size(group), 1))
    return put_together(AllToAll.apply(by_rank, group), 2)


def positions_for_heads(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange back an output that has positions before heads: (B, S, H/n, D) to (B, P, H, D)."""
    received = AllToAll.apply(divided(part, 1, dist.get_world_size(group)), group)
    return torch.cat(received.unbind(0), 2)

"""Which rank has which positions.

[Note: head and tail] A sequence is cut into 2n chunks for n ranks, and rank r has the chunks r and 2n - 1 - r, one
behind the other. Under a causal mask an early chunk sees little and a late one much, so all ranks have equal work.
Source: Dubey et al. 2024, arXiv:2407.21783, section 3.3.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

Way = Literal["allgather", "ulysses"]


@dataclass(frozen=True)
class Share:
    """Which positions of each sequence this rank has, and who has the others.

    Attributes:
        group, size, rank: of the axis `cp`.
        way: how they are exchanged; see [Note: two ways] in `attention`.
    """

    group: dist.ProcessGroup
    size: int
    rank: int
    way: Way

    def positions(self, length: int, device: torch.device | None = None) -> Tensor:
        """This rank's positions of a sequence of `length`, which 2 x `size` divides; int64."""
        return positions(length, self.rank, self.size, device)

    def starts(self, length: int) -> tuple[int, int]:
        """The first positions of this rank's two chunks."""
        chunk = length // (2 * self.size)
        return self.rank * chunk, (2 * self.size - 1 - self.rank) * chunk

    def own(self, whole: Tensor) -> Tensor:
        """This rank's positions of a tensor (B, S, ...)."""
        return local_part(whole, 1, self.rank, self.size)


def positions(length: int, rank: int, ranks: int, device: torch.device | None = None) -> Tensor:
    """This rank's positions of a sequence of `length`, which 2 x `ranks` divides; int64."""
    whole = torch.arange(length, device=device)
    return local_part(whole, 0, rank, ranks)


def local_part(whole: Tensor, dim: int, rank: int, ranks: int) -> Tensor:
    """This rank's positions of a tensor that has all of them along `dim`."""
    chunks = whole.chunk(2 * ranks, dim)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]], dim)


def put_together(parts: Sequence[Tensor] | Tensor, dim: int) -> Tensor:
    """All positions in order along `dim`, from the parts of all ranks."""
    halves = [part.chunk(2, dim) for part in parts]
    return torch.cat([first for first, _ in halves] + [last for _, last in reversed(halves)], dim)


def divided(whole: Tensor, dim: int, ranks: int) -> Tensor:
    """The parts of all ranks, stacked along a new first dim."""
    return torch.stack([local_part(whole, dim, rank, ranks) for rank in range(ranks)])

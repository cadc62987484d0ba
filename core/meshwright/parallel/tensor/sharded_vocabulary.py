"""A vocabulary whose entries the ranks of `tp` share."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from ..._compat.torch import all_gather
from ...step.vocabulary import Vocabulary
from .collectives import chunk_sizes, gather


@dataclass(frozen=True)
class ShardedVocabulary(Vocabulary):
    """See `Vocabulary`; divided as `Shard` divides.

    Attributes:
        entries: in all.
        start: the first one of this rank.
        group: the ranks.
    """

    entries: int
    group: dist.ProcessGroup
    start: int = 0

    @classmethod
    def over(cls, group: dist.ProcessGroup, entries: int) -> ShardedVocabulary:
        """This rank's part of it."""
        sizes = chunk_sizes(entries, dist.get_world_size(group))
        return cls(entries, group, sum(sizes[: dist.get_rank(group)]))

    def size(self, local: int) -> int:
        return self.entries

    def each(self, local: Tensor) -> Tensor:
        return all_gather(local[None], 0, self.group)

    def gathered(self, logits: Tensor) -> Tensor:
        return gather(logits, -1, self.entries, self.group)

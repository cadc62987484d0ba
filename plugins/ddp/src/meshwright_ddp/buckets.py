"""Buckets of gradients: what one collective carries, and what has come of it in this step.

Where a bucket begins and ends is `bucket_ranges`' affair, how it travels `reduction`'s, and when it sets out
`gradient_sync`'s.

[Note: when a bucket is ready] The first step only counts how often each parameter gets a gradient in the last
microbatch. From the second on, a bucket is dispatched when all its parameters have been counted as often, and at the
end of the step otherwise. A parameter without a gradient in the first step may get one later, so its bucket waits for
the end of each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from .buffers import Buffer
from .config import DistributedDataParallelConfig
from .parameter_gather import BucketGather
from .reduction import Groups, Reduction, Scaling


@dataclass(eq=False)
class Slot:
    """Where the gradients of one parameter go.

    Attributes:
        name, parameter: of the model.
        gradient: its place in the buffer, a view in the parameter's shape and the buffer's dtype.
        local: where microbatches add up: `gradient` itself, or a tensor of its shape in float32 at least.
    """

    name: str
    parameter: nn.Parameter
    gradient: Tensor
    local: Tensor


@dataclass(eq=False)
class Bucket:
    """See [Note: bucket] in `bucket_ranges`.

    Attributes:
        slots: in registration order.
        reduction: its collective.
        gather: brings the values of its parameters from their owners; None without the distributed optimizer.
        counts: how often each parameter got a gradient in this step's last microbatch.
        reference: the counts of the first step; None during it.
        missing: how many parameters have counts that have not reached the reference.
        is_dispatched: whether its collective has been issued in this step.
    """

    slots: list[Slot]
    reduction: Reduction
    gather: BucketGather | None = None
    counts: Counter[Slot] = field(default_factory=Counter)
    reference: Counter[Slot] | None = None
    missing: int = 0
    is_dispatched: bool = False

    def begin(self) -> None:
        """Begin a step. Waits for a collective that is under way."""
        self.reduction.wait()
        self.is_dispatched = False
        self.counts.clear()
        self.missing = len(self.slots)

    def count(self, slot: Slot) -> None:
        """Note that the last microbatch has given the parameter of a slot a gradient."""
        self.counts[slot] += 1
        if self.reference is not None and self.counts[slot] == self.reference[slot]:
            self.missing -= 1

    def finish(self) -> None:
        """End a step: wait for the collective, after which the buffer holds sums. The first step sets the reference."""
        self.reduction.wait()
        if self.reference is None and self.counts:
            self.reference = Counter(self.counts)

    @property
    def is_ready(self) -> bool:
        """See [Note: when a bucket is ready]."""
        return self.missing == 0


def make_buckets(buffers: Sequence[Buffer], config: DistributedDataParallelConfig, groups: Groups) -> list[Bucket]:
    """The buckets of all buffers, in the order in which backward is expected to complete them.

    Args:
        buffers: of `make_buffers`, one for each dtype.
        config: how buckets travel, and which gradients add up in float32.
        groups: over which ranks.
    """
    # [Note: the gradient rule] wants sums, so an average in the collective is made up for before.
    scaling = Scaling(groups.ranks, average=True) if config.average_in_collective else Scaling()
    found: list[tuple[int, Bucket]] = []
    for buffer in buffers:
        slots = [_slot(buffer, index, config) for index in range(len(buffer.parameters))]
        for (start, end), members in zip(buffer.layout.buckets, buffer.layout.members, strict=True):
            reduction = Reduction(
                buffer.gradients[start:end],
                groups,
                scaling,
                scatter=config.use_distributed_optimizer,
                wide=config.reduce_scatter_with_fp32_accumulation,
            )
            gather = None if buffer.values is None else BucketGather(buffer.values[start:end], groups.shard)
            found.append((buffer.first[members[0]], Bucket([slots[i] for i in members], reduction, gather)))
    return [bucket for _, bucket in sorted(found, key=lambda each: each[0], reverse=True)]


def _slot(buffer: Buffer, index: int, config: DistributedDataParallelConfig) -> Slot:
    name, gradient = buffer.names[index], buffer.gradient(index)
    patterns = config.param_name_patterns_for_fp32_local_accumulation
    local = gradient
    if any(pattern == "all" or fnmatchcase(name, pattern) for pattern in patterns):
        local = torch.zeros_like(gradient, dtype=torch.promote_types(gradient.dtype, torch.float32))
    return Slot(name, buffer.parameters[index], gradient, local)

"""Where parameters lie in a flat buffer, and how the buffer is cut into buckets. Pure arithmetic: no torch.

[Note: bucket] Parameters lie in the reverse of their registration order, which is about the order in which backward
yields their gradients. A bucket is the stretch of the buffer that one collective carries, and holds whole parameters:
it ends behind the one that brings it to `bucket_size`, so most are somewhat larger. With the distributed optimizer,
rank r of the W ranks that shard it owns the r-th W-th of every bucket, wherever parameters begin and end. Sizes are in
elements.
Source: the semantics of Megatron-Core's buffers for parameters and gradients, as measured on its layouts.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

PARAMETER_ALIGNMENT = 64
BUCKET_ALIGNMENT = 128
HIGH_BUSBW_ALIGNMENT = 2**16

MIN_BUCKET_SIZE = 40_000_000
BUCKET_SIZE_PER_RANK = 1_000_000


@dataclass(frozen=True)
class BucketLayout:
    """See [Note: bucket].

    Attributes:
        buckets: (start, end) of each bucket, in the order of the buffer.
        unpadded: elements of each bucket without the padding at its end.
        param_ranges: (start, end, bucket) of each parameter, in registration order.
        dp_size: W, the ranks that share each bucket.
    """

    buckets: list[tuple[int, int]]
    unpadded: list[int]
    param_ranges: list[tuple[int, int, int]]
    dp_size: int

    @property
    def numel(self) -> int:
        """Elements of the whole buffer."""
        return self.buckets[-1][1] if self.buckets else 0

    @property
    def members(self) -> list[list[int]]:
        """Indices of the parameters of each bucket, in registration order."""
        members: list[list[int]] = [[] for _ in self.buckets]
        for index, (_, _, bucket) in enumerate(self.param_ranges):
            members[bucket].append(index)
        return members

    def part(self, bucket: int, rank: int) -> tuple[int, int]:
        """(start, end) in the buffer, in elements, of what a rank owns of a bucket.

        Args:
            bucket: its number in the order of the buffer.
            rank: 0 to W - 1.
        """
        start, end = self.buckets[bucket]
        size = (end - start) // self.dp_size
        return start + rank * size, start + (rank + 1) * size

    def owned(self, index: int, rank: int) -> tuple[int, int]:
        """(start, end) within the flattened parameter `index` of what a rank owns of it; (0, 0) where that is nothing.

        Args:
            index: in registration order.
            rank: 0 to W - 1.
        """
        start, end, bucket = self.param_ranges[index]
        low, high = self.part(bucket, rank)
        low, high = max(low, start), min(high, end)
        return (low - start, high - start) if low < high else (0, 0)


def bucket_layout(
    numels: Sequence[int],
    *,
    bucket_size: int | None,
    dp_size: int,
    distributed_optimizer: bool,
    shared_embeddings: Collection[int] = frozenset(),
    pad_for_high_busbw: bool = False,
) -> BucketLayout:
    """Lay parameters out in one buffer.

    Args:
        numels: sizes of the parameters [elements], in registration order.
        bucket_size: a bucket ends with the parameter that brings it to this [elements]; None: one bucket for all.
        dp_size: W, the ranks that share each bucket.
        distributed_optimizer: align parameters, and pad buckets so that W divides them.
        shared_embeddings: indices of parameters that get a bucket of their own; acts with the distributed optimizer.
        pad_for_high_busbw: pad buckets to a large power of two, too.
    """
    layout = BucketLayout([], [], [(0, 0, 0)] * len(numels), dp_size)
    if not distributed_optimizer:
        shared_embeddings, start_multiple, end_multiple = (), 1, 1
    else:
        start_multiple = PARAMETER_ALIGNMENT
        end_multiple = math.lcm(dp_size, BUCKET_ALIGNMENT, HIGH_BUSBW_ALIGNMENT if pad_for_high_busbw else 1)
    bucket_start = position = 0
    is_empty = True

    def close(end: int) -> int:
        """End the bucket behind `end`; where the next one starts."""
        padded = _round_up(end, end_multiple)
        layout.buckets.append((bucket_start, padded))
        layout.unpadded.append(end - bucket_start)
        return padded

    for index in reversed(range(len(numels))):
        start = _round_up(position, start_multiple)
        if index in shared_embeddings and not is_empty:
            start = bucket_start = close(start)
        position = start + numels[index]
        layout.param_ranges[index] = (start, position, len(layout.buckets))
        is_full = bucket_size is not None and position - bucket_start >= bucket_size
        is_empty = is_full or index in shared_embeddings
        if is_empty:
            position = bucket_start = close(position)
    if not is_empty:
        close(position)
    return layout


def default_bucket_size(dp_size: int) -> int:
    """The bucket size [elements] where none is given: more ranks need larger messages.

    Args:
        dp_size: ranks over which gradients are summed.
    """
    return max(MIN_BUCKET_SIZE, BUCKET_SIZE_PER_RANK * dp_size)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple

"""Communication hooks that sum gradients, where DDP's own reduction averages.

Source: torch.distributed.GradBucket and DistributedDataParallel.register_comm_hook.
"""

# No `from __future__ import annotations` here: DDP compares a hook's annotations with its own classes.
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.accumulate import WideSums

Hook: TypeAlias = Callable[[Any, dist.GradBucket], torch.futures.Future[Tensor]]


def sum_hook(group: dist.ProcessGroup) -> Hook:
    """All-reduce each bucket by SUM."""

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        future = dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future()
        return future.then(lambda done: done.value()[0])

    return hook


def wide_sum_hook(group: dist.ProcessGroup, sums: WideSums) -> Hook:
    """Add the waiting sums of earlier microbatches to each bucket, all-reduce it in their dtype and round once."""

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer()
        wide = buffer.to(sums.dtype)
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            start = gradient.storage_offset() - buffer.storage_offset()
            part = wide.as_strided(gradient.size(), gradient.stride(), start)
            sums.add_waiting(parameter, part)
        future = dist.all_reduce(wide, group=group, async_op=True).get_future()
        return future.then(lambda done: done.value()[0].to(buffer.dtype))

    return hook

"""Communication hooks that sum gradients, where DDP's own reduction and torch's hooks average.

They are for torch's engine alone: the bucketed one sums by itself (see `reduction`). A hook gets one bucket, 1-D, and
gives a future of the sum over ranks, in the bucket's shape and dtype.
Source: torch.distributed.GradBucket, DistributedDataParallel.register_comm_hook and torch's hooks; Vogels et al. 2019,
arXiv:1905.13727, for PowerSGD.
"""

# No `from __future__ import annotations` here: DDP compares a hook's annotations with its own classes.
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from meshwright.base.errors import ConfigError
from meshwright.tensors.wide_sums import WideSums
from meshwright.train.arguments import check_arguments

Hook: TypeAlias = Callable[[Any, dist.GradBucket], torch.futures.Future[Tensor]]


def sum_hook(group: dist.ProcessGroup) -> Hook:
    """All-reduce each bucket by SUM, in its own dtype, over the ranks of `group`."""

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer()
        future = dist.all_reduce(buffer, group=group, async_op=True).get_future()
        return future.then(lambda done: _after(done, buffer))

    return hook


def _after(done: torch.futures.Future[list[Tensor]], reduced: Tensor) -> Tensor:
    """What was reduced in place, if nothing has failed."""
    done.value()
    return reduced


def wide_sum_hook(group: dist.ProcessGroup, sums: WideSums) -> Hook:
    """Add the waiting sums of earlier microbatches to each bucket, all-reduce it in their dtype and round once.

    Args:
        group: the ranks to sum over.
        sums: of earlier microbatches, by parameter.
    """

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer()
        wide = buffer.to(sums.dtype)
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            start = gradient.storage_offset() - buffer.storage_offset()
            part = wide.as_strided(gradient.size(), gradient.stride(), start)
            sums.add_waiting(parameter, part)
        future = dist.all_reduce(wide, group=group, async_op=True).get_future()
        return future.then(lambda done: buffer.copy_(_after(done, wide)))

    return hook


def compressing_hook(name: str, options: Mapping[str, Any], group: dist.ProcessGroup) -> tuple[Any, Hook]:
    """A hook that loses precision, and its state, for `register_comm_hook`.

    Args:
        name: one of `config.COMM_HOOKS`.
        options: arguments of torch's PowerSGDState, for power_sgd.
        group: the ranks to sum over.

    Raises:
        ConfigError: PowerSGDState refuses its options (on all ranks alike).
    """
    if name == "fp16_compress":
        return None, _rounding_hook(group, torch.float16)
    if name == "bf16_compress":
        return None, _rounding_hook(group, torch.bfloat16)
    check_arguments(powerSGD_hook.PowerSGDState, options, where="comm_hook_options")
    try:
        state = powerSGD_hook.PowerSGDState(process_group=group, **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"comm_hook_options {dict(options)} are refused by PowerSGDState: {error}") from None
    return state, _summing(powerSGD_hook.powerSGD_hook, dist.get_world_size(group))


def _rounding_hook(group: dist.ProcessGroup, dtype: torch.dtype) -> Hook:
    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer()
        rounded = buffer.to(dtype)
        future = dist.all_reduce(rounded, group=group, async_op=True).get_future()
        return future.then(lambda done: buffer.copy_(_after(done, rounded)))

    return hook


def _summing(averaging: Hook, ranks: int) -> Hook:
    """What torch's own hook averages, as a sum."""

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        return averaging(state, bucket).then(lambda done: done.value().mul_(ranks))

    return hook

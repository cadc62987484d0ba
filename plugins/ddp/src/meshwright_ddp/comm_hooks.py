"""Communication hooks of torch's engine that sum gradients; DDP's own reduction and torch's hooks average.

A hook takes one bucket, 1-D, and returns a future of the sum over ranks, in the bucket's shape and dtype.
Source: DistributedDataParallel.register_comm_hook; Vogels et al. 2019, arXiv:1905.13727, for PowerSGD.
"""

# No `from __future__ import annotations` here: DDP compares a hook's annotations with its own classes.
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from meshwright.plugin import ConfigError, HighPrecisionAccumulator, check_argument_types

CommHook: TypeAlias = Callable[[Any, dist.GradBucket], torch.futures.Future[Tensor]]


def build_sum_hook(group: dist.ProcessGroup) -> CommHook:
    """Return a hook that all-reduces each bucket by SUM, in its own dtype."""

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer()
        return _all_reduce_into(buffer, buffer, group)

    return hook


def build_high_precision_sum_hook(group: dist.ProcessGroup, accumulator: HighPrecisionAccumulator) -> CommHook:
    """Return a hook that adds the pending sums of earlier microbatches, all-reduces in their dtype and rounds once."""

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer()
        high_precision = buffer.to(accumulator.dtype)
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            start = gradient.storage_offset() - buffer.storage_offset()
            accumulator.add_pending(parameter, high_precision.as_strided(gradient.size(), gradient.stride(), start))
        return _all_reduce_into(high_precision, buffer, group)

    return hook


def build_compression_hook(name: str, options: Mapping[str, Any], group: dist.ProcessGroup) -> tuple[Any, CommHook]:
    """Return the state and hook for one of `config.COMM_HOOKS`; `options` are arguments of PowerSGDState."""
    if name != "power_sgd":
        dtype = torch.float16 if name == "fp16_compress" else torch.bfloat16

        def compress(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            return _all_reduce_into(bucket.buffer().to(dtype), bucket.buffer(), group)

        return None, compress
    check_argument_types(powerSGD_hook.PowerSGDState, options, where="comm_hook_options")
    try:
        power_sgd_state = powerSGD_hook.PowerSGDState(process_group=group, **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"comm_hook_options {dict(options)} are refused by PowerSGDState: {error}") from None
    ranks = dist.get_world_size(group)

    def sum_power_sgd(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        # torch's own hook averages.
        return powerSGD_hook.powerSGD_hook(state, bucket).then(lambda done: done.value().mul_(ranks))

    return power_sgd_state, sum_power_sgd


def _all_reduce_into(values: Tensor, buffer: Tensor, group: dist.ProcessGroup) -> torch.futures.Future[Tensor]:
    """All-reduce `values`, which may be the bucket's buffer itself, into the buffer."""
    future = dist.all_reduce(values, group=group, async_op=True).get_future()

    def on_done(done: torch.futures.Future[list[Tensor]]) -> Tensor:
        # Raises if the collective has failed.
        done.value()
        return buffer if values is buffer else buffer.copy_(values)

    return future.then(on_done)

"""Private calls on a wrapped model, `fsdp`, as returned by `wrap_model.wrap_model`.

[Note: two states] A wrapped model holds either its raw parameters, which modules compute with (freed if they are
sharded), or its sharded parameters: DTensors that the optimizer trains. A forward switches to the raw state, the end of
a step to the sharded state.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from .package import import_submodule

# -- states


def use_raw_parameters(fsdp: Any) -> None:
    fsdp._replace_param_with_raw_if_needed()


def use_sharded_parameters(fsdp: Any) -> None:
    fsdp._replace_param_with_distributed_if_needed()


def wait_for_prefetched_gathers(fsdp: Any) -> None:
    """Wait for prefetched gathers that were not used; the package would warn about them."""
    pipeline = fsdp.all_gather_pipeline
    for bucket, bwd in list(pipeline.param_gather_event_map):
        pipeline.wait_bucket_ready(bucket, bwd)


@contextmanager
def unshard_parameters(fsdp: Any) -> Iterator[None]:
    """Keep all parameters unsharded, in the raw state. Forwards within the context neither gather nor free. Collective.

    The public `start_param_sync` does not gather over dp_replicate, which outer sharding needs, and the first forward
    frees the gathered parameters. Double buffers only have room for two units, so they are replaced. The package's
    hooks look up every parameter of a module, and within the context modules may hold other ones.
    """
    use_raw_parameters(fsdp)
    pipeline, buffer = fsdp.all_gather_pipeline, fsdp.param_and_grad_buffer
    with _disable_double_buffers(fsdp):
        fsdp.all_gather_and_wait_parameters_ready(list(fsdp.raw_param.values()), prefetch=False)
        numbers = buffer.param_to_param_group
        pipeline.release_bucket = lambda *args, **options: None
        fsdp.all_gather_and_wait_parameters_ready = lambda *args, **options: None
        buffer.param_to_param_group = defaultdict(int)
        try:
            yield
        finally:
            buffer.param_to_param_group = numbers
            del pipeline.release_bucket, fsdp.all_gather_and_wait_parameters_ready
            wait_for_prefetched_gathers(fsdp)
            pipeline.reset()
            use_sharded_parameters(fsdp)


@contextmanager
def _disable_double_buffers(fsdp: Any) -> Iterator[None]:
    config = fsdp.ddp_config
    if not config.fsdp_double_buffer:
        yield
        return
    module = import_submodule("param_and_grad_buffer")
    groups = fsdp.param_and_grad_buffer.parameter_groups
    buffers = [b for g in groups for b in (g.model_weight_buffer, g.hfsdp_helper_wbuf) if b is not None]
    allocators = [buffer.temporary_bucket_allocator for buffer in buffers]
    config.fsdp_double_buffer = False
    shared_allocator = module.StorageResizeBasedBucketAllocator()
    for buffer in buffers:
        buffer.temporary_bucket_allocator = shared_allocator
    try:
        yield
    finally:
        config.fsdp_double_buffer = True
        for buffer, allocator in zip(buffers, allocators, strict=True):
            buffer.temporary_bucket_allocator = allocator


def count_units_without_double_buffer(fsdp: Any) -> tuple[int, int]:
    """Return how many units do not fit the double buffers, which have most units' shape, and the number of units."""
    buffer = fsdp.param_and_grad_buffer
    units = {group.fsdp_unit_id for group in buffer.parameter_groups} - {None}
    pools = (buffer.weight_alloc, buffer.main_grad_alloc)
    pooled_units = [set(pool.fsdp_double_buffer_units) for pool in pools if hasattr(pool, "fsdp_double_buffer_units")]
    return max((len(units - each) for each in pooled_units), default=0), len(units)


# -- shards


@dataclass(frozen=True)
class ShardRange:
    """The elements `start` to `end` of a flattened parameter that a rank holds."""

    start: int
    end: int
    group: dist.ProcessGroup | None
    dtype: torch.dtype


def find_shard_ranges(fsdp: Any) -> dict[nn.Parameter, ShardRange]:
    """Return the range of each sharded parameter; DTensor's `full_tensor` expects even shards."""
    buffer = fsdp.param_and_grad_buffer
    sharded = dict(buffer.optimizer_named_parameters)
    shard_ranges = {}
    for group in buffer.parameter_groups:
        weights = group.main_weight_buffer if group.main_weight_buffer is not None else group.model_weight_buffer
        for item, raw in enumerate(group.params):
            if fsdp.data_parallel_sharding_strategy == "no_shard":
                shard_range = ShardRange(0, raw.numel(), None, raw.dtype)
            else:
                start, end = weights._get_item_slice_in_shard(item)
                shard_range = ShardRange(start, end, weights.data_parallel_group, raw.dtype)
            shard_ranges[sharded[buffer.param_to_name[raw]]] = shard_range
    return shard_ranges


# -- backward


def is_in_backward(fsdp: Any) -> bool:
    return bool(fsdp._root_pre_backward_hook_issued)


def begin_backward(fsdp: Any) -> None:
    """Start a backward before its first gradient; repeated calls have no effect.

    The package detects the start from a tensor or tuple that the model returns, or else from the last submodule, which
    may not run.
    """
    fsdp.pre_backward.func(None)


def remove_gradient_hooks(fsdp: Any) -> dict[nn.Parameter, Callable[[nn.Parameter], None]]:
    """Remove and return the hooks by which the package accumulates and reduces each raw parameter's gradient.

    The package reduces a unit as soon as its last gradient is available. Ranks that use different parameters would then
    reduce and gather in different orders.
    """
    hooks: dict[nn.Parameter, Callable[[nn.Parameter], None]] = {}
    for parameter in fsdp.raw_param.values():
        registered = parameter._post_accumulate_grad_hooks
        if registered:
            hooks[parameter] = next(iter(registered.values()))
            registered.clear()
    return hooks


def find_pending_parameters(fsdp: Any) -> set[nn.Parameter]:
    """Return the raw parameters whose gradients this backward has not processed yet."""
    waiting: set[nn.Parameter] = fsdp._params_require_handle_grad
    return waiting


def flatten_tensors(value: Any) -> list[Tensor]:
    """Return the tensors in nested containers, including containers that transformers registers with torch's pytree."""
    return [leaf for leaf in tree_iter(value) if isinstance(leaf, Tensor)]

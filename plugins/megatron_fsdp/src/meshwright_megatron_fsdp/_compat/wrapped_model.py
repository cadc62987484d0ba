"""Private calls of a wrapped model, `fsdp`, which `wrapping.wrap` returns.

[Note: two states] A wrapped model holds either its raw parameters, with which modules compute (freed where they are
sharded), or its sharded ones: DTensors that the optimizer trains. Forward brings the raw state, the end of a step the
sharded one.
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
    """Wait for what was gathered ahead and not used, of which the package would warn."""
    pipeline = fsdp.all_gather_pipeline
    for bucket, bwd in list(pipeline.param_gather_event_map):
        pipeline.wait_bucket_ready(bucket, bwd)


@contextmanager
def unshard_parameters(fsdp: Any) -> Iterator[None]:
    """Hold all parameters whole, in the raw state; forwards inside gather and free nothing. Collective.

    The public `start_param_sync` does not gather over dp_replicate, as outer sharding needs, and the first forward
    frees what it has gathered. Double buffers hold two units, so others take their place. The package's hooks look up
    every parameter that they meet, and inside there may be others in the modules.
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
    before = [buffer.temporary_bucket_allocator for buffer in buffers]
    config.fsdp_double_buffer = False
    unlimited = module.StorageResizeBasedBucketAllocator()
    for buffer in buffers:
        buffer.temporary_bucket_allocator = unlimited
    try:
        yield
    finally:
        config.fsdp_double_buffer = True
        for buffer, allocator in zip(buffers, before, strict=True):
            buffer.temporary_bucket_allocator = allocator


def count_units_without_double_buffer(fsdp: Any) -> tuple[int, int]:
    """Return how many units do not fit the double buffers, shaped for most of them, and how many units there are."""
    buffer = fsdp.param_and_grad_buffer
    units = {group.fsdp_unit_id for group in buffer.parameter_groups} - {None}
    pools = (buffer.weight_alloc, buffer.main_grad_alloc)
    served = [set(pool.fsdp_double_buffer_units) for pool in pools if hasattr(pool, "fsdp_double_buffer_units")]
    return max((len(units - each) for each in served), default=0), len(units)


# -- shards


@dataclass(frozen=True)
class ShardRange:
    """The elements start to end that a rank holds of a flattened parameter."""

    start: int
    end: int
    group: dist.ProcessGroup | None
    dtype: torch.dtype


def find_shard_ranges(fsdp: Any) -> dict[nn.Parameter, ShardRange]:
    """Return the slot of each sharded parameter; DTensor's `full_tensor` expects even shards."""
    buffer = fsdp.param_and_grad_buffer
    sharded = dict(buffer.optimizer_named_parameters)
    found = {}
    for group in buffer.parameter_groups:
        weights = group.main_weight_buffer if group.main_weight_buffer is not None else group.model_weight_buffer
        for item, raw in enumerate(group.params):
            if fsdp.data_parallel_sharding_strategy == "no_shard":
                slot = ShardRange(0, raw.numel(), None, raw.dtype)
            else:
                start, end = weights._get_item_slice_in_shard(item)
                slot = ShardRange(start, end, weights.data_parallel_group, raw.dtype)
            found[sharded[buffer.param_to_name[raw]]] = slot
    return found


# -- backward


def is_in_backward(fsdp: Any) -> bool:
    return bool(fsdp._root_pre_backward_hook_issued)


def begin_backward(fsdp: Any) -> None:
    """Begin a backward before its first gradient; does nothing when called again.

    The package finds this moment by a tensor or tuple that the model returns, or else by the last submodule, which may
    not run.
    """
    fsdp.pre_backward.func(None)


def remove_gradient_hooks(fsdp: Any) -> dict[nn.Parameter, Callable[[nn.Parameter], None]]:
    """Remove and return the hooks by which the package accumulates and reduces each raw parameter's gradient.

    It reduces a unit as soon as its last gradient has come, so ranks that use different parameters would reduce, and
    gather, in different orders.
    """
    hooks: dict[nn.Parameter, Callable[[nn.Parameter], None]] = {}
    for parameter in fsdp.raw_param.values():
        registered = parameter._post_accumulate_grad_hooks
        if registered:
            hooks[parameter] = next(iter(registered.values()))
            registered.clear()
    return hooks


def find_pending_parameters(fsdp: Any) -> set[nn.Parameter]:
    """Return the raw parameters whose gradients this backward has not dealt with yet."""
    waiting: set[nn.Parameter] = fsdp._params_require_handle_grad
    return waiting


def flatten_tensors(value: Any) -> list[Tensor]:
    """Return the tensors in nested containers, including those that transformers registers with this private module."""
    return [leaf for leaf in tree_iter(value) if isinstance(leaf, Tensor)]

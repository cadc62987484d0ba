"""Private and version-dependent names of torch and transformers. No other module in this package uses them.

tests/test_fsdp2_compat.py has a canary for each. docs/reference/proofs/versions.md lists the versions that passed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

SHIMS = ("reduce_unused_params",)
"""Functions that torch 2.13 does not need; see `meshwright._compat.torch`."""


@contextmanager
def keep_unsharded_after_forward(units: list[FSDPModule]) -> Iterator[None]:
    """Let units keep their unsharded parameters after forward; restore their policy on exit.

    `set_reshard_after_forward` does not accept a number of ranks, so the private attribute is saved and restored.
    """
    groups = [group for unit in units for group in _find_param_groups(unit)]
    saved = [group.post_forward_mesh_info for group in groups]
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for group, info in zip(groups, saved, strict=True):
            group.post_forward_mesh_info = info


def init_root(root: FSDPModule) -> None:
    """Initialize the root, as its first forward does; `generate` of a peft model runs other units without that."""
    root._get_fsdp_state()._lazy_init()


def _find_param_groups(unit: FSDPModule) -> list[Any]:
    state = unit._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    # Before torch 2.13: one group or None.
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def reduce_unused_params(unit: FSDPModule) -> None:
    """Count missing gradients as zero in the reduction, if this rank does not use a parameter.

    Call `set_reduce_scatter_unused_params` if torch has it. Otherwise zeros replace missing gradients at the end of the
    unit's backward, where torch has no public hook.
    """
    if hasattr(unit, "set_reduce_scatter_unused_params"):
        unit.set_reduce_scatter_unused_params(True, recurse=False)
        return
    for group in _find_param_groups(unit):
        group.post_backward = partial(_post_backward_with_zeros, group, group.post_backward)


def _post_backward_with_zeros(group: Any, post_backward: Callable[..., None], *args: Any) -> None:
    if group.reduce_grads:
        # Gradients of earlier microbatches are in `unsharded_accumulated_grad`, those of this one in `grad`.
        unsharded = [each for each in group.fsdp_params if hasattr(each, "_unsharded_param")]
        for parameter in unsharded:
            full = parameter.unsharded_param
            if full.requires_grad and full.grad is None and parameter.unsharded_accumulated_grad is None:
                # A unit is reduced in one dtype: with sums of earlier microbatches it is theirs, `reduce_dtype`.
                if any(each.unsharded_accumulated_grad is not None for each in unsharded):
                    dtype = parameter.reduce_dtype or full.dtype
                    parameter.unsharded_accumulated_grad = torch.zeros_like(full, dtype=dtype)
                else:
                    full.grad = torch.zeros_like(full)
    post_backward(*args)


def upcast_accumulated_grads(units: list[FSDPModule]) -> None:
    """Add pending gradients to the sums in `reduce_dtype`, as the end of each unit's backward does.

    Without it, later gradients would be added in their own dtype. Parameters of a unit without gradients get zeros,
    since a unit with sums of two dtypes cannot be reduced.
    """
    for group in (each for unit in units for each in _find_param_groups(unit)):
        unsharded = [each for each in group.fsdp_params if hasattr(each, "_unsharded_param")]
        for parameter in unsharded:
            parameter.accumulate_unsharded_grad_if_needed()
            parameter.to_accumulated_grad_if_needed()
        without = [each for each in unsharded if each.unsharded_accumulated_grad is None]
        for parameter in without if len(without) < len(unsharded) else ():
            full = parameter.unsharded_param
            if full.requires_grad:
                parameter.unsharded_accumulated_grad = torch.zeros_like(full, dtype=parameter.reduce_dtype)


def reduce_accumulated_grads(root: FSDPModule) -> None:
    """Reduce the accumulated gradients, as the end of a backward and torch's pipeline runtime do."""
    root._get_fsdp_state()._root_post_backward_final_callback()


@contextmanager
def disable_packed_sequence_check() -> Iterator[bool]:
    """Make transformers' private check for packed sequences return False in every module that has imported it.

    Yield whether this version of transformers has the check.
    """
    from transformers import modeling_flash_attention_utils as home

    original = getattr(home, "_is_packed_sequence", None)
    modules = [
        module
        for name, module in list(sys.modules.items())
        if name.split(".")[0] == "transformers" and vars(module).get("_is_packed_sequence") is original is not None
    ]
    for module in modules:
        vars(module)["_is_packed_sequence"] = lambda position_ids, batch_size: False
    try:
        yield original is not None
    finally:
        for module in modules:
            vars(module)["_is_packed_sequence"] = original


def enable_async_tensor_parallel(group: dist.ProcessGroup) -> None:
    """Let compiled code overlap collectives of a `tp` group on CUDA with its matrix products.

    Not run on a GPU yet (docs/reference/proofs/gpu.md); written from the sources of torch 2.11 and 2.13.
    """
    import torch._inductor.config
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    torch._inductor.config._micro_pipeline_tp = True
    enable_symm_mem_for_group(group.group_name)

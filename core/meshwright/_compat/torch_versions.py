"""Names that differ between the versions of torch that are supported, oldest first: 2.11 to 2.15.

Each function calls the current name where the installed torch has it, and its predecessor otherwise. torch 2.13 needs
no `SHIMS`: once `pyproject.toml` asks for it, `tests/contract/test_compat.py` fails until they are deleted.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

SHIMS = (
    *("all_gather_single", "reduce_scatter_single", "functional_all_gather", "functional_reduce_scatter"),
    *("compile_with_limit", "compiles_attention_in_float64", "category_of"),
)

all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_all_gather = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor
_reduce_scatter = getattr(funcol, "reduce_scatter_single", None) or funcol.reduce_scatter_tensor


def functional_all_gather(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    gathered: Tensor = _all_gather(tensor, dim, group)
    return gathered


def functional_reduce_scatter(tensor: Tensor, op: str, dim: int, group: dist.ProcessGroup) -> Tensor:
    scattered: Tensor = _reduce_scatter(tensor, op, dim, group)
    return scattered


def compile_with_limit(function: Callable[..., Any], *, backend: str, recompile_limit: int) -> Callable[..., Any]:
    """Call `torch.compile` with `recompile_limit`; without that argument, raise the limit of the process."""
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        return torch.compile(function, backend=backend, recompile_limit=recompile_limit)
    torch._dynamo.config.recompile_limit = max(recompile_limit, torch._dynamo.config.recompile_limit)
    return torch.compile(function, backend=backend)


@functools.cache
def compiles_attention_in_float64() -> bool:
    """Return whether torch.compile knows the dtype of what the CPU's fused attention saves for backward in float64.

    torch 2.11 and 2.12 take its log-sum-exp for float32, and a compiled backward fails: "expected scalar type Double".
    """
    one = torch.empty(1, 1, 1, 1, dtype=torch.float64, device="meta")
    _, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(one, one, one)
    return bool(logsumexp.dtype == torch.float64)


def category_of(event: Any) -> str:
    """Return the Kineto category of an event, such as "cpu_op"; without `activity_type`, by device and name."""
    if hasattr(event, "activity_type"):
        return str(event.activity_type())
    if event.device_type() == torch.autograd.DeviceType.CPU:
        if event.is_user_annotation():
            return "user_annotation"
        return "cuda_runtime" if _CUDA_CALL.match(event.name()) else "cpu_op"
    copies = {"Memcpy": "gpu_memcpy", "Memset": "gpu_memset"}
    return "gpu_user_annotation" if event.is_user_annotation() else copies.get(event.name()[:6], "kernel")


_CUDA_CALL = re.compile(r"cuda?[A-Z]|hip[A-Z]")
"""Names of functions of the CUDA and HIP runtimes and drivers."""

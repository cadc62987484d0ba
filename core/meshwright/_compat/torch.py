"""Private names of torch, and names that differ between the supported versions, 2.11 to 2.15.

torch 2.13 does not need the `SHIMS`. Once `pyproject.toml` requires it, `tests/contract/test_compat.py` fails until
they are deleted.
"""

from __future__ import annotations

import functools
import inspect
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement, _StridedShard

# Intercepts every operator, including those within torch's own functions, which `torch.overrides` cannot. The module is
# private, although torch's documentation explains the class.
from torch.profiler import record_function
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

from ..base.errors import MeshError, StrategyError

SHIMS = (
    *("all_gather_single", "reduce_scatter_single", "functional_all_gather", "functional_reduce_scatter"),
    *("compile_with_limit", "compiles_attention_in_float64", "get_event_category"),
)

all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Gather equal chunks into one tensor: (output, input, group=...)."""
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Reduce one tensor and keep an equal chunk: (output, input, op=..., group=...)."""

functional_all_gather: Callable[..., Tensor] = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor
functional_reduce_scatter: Callable[..., Tensor] = (
    getattr(funcol, "reduce_scatter_single", None) or funcol.reduce_scatter_tensor
)
GLOO_THREAD_NAME = "pt_gloo_runloop"
"""Name of gloo's worker threads, which torch does not document."""


class UncompiledMode(TorchDispatchMode):
    """A dispatch mode under which nothing is compiled, so that torch need not disable its compiler at each operator."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def flatten_mesh(mesh: DeviceMesh, axes: Sequence[str], name: str) -> DeviceMesh:
    """Register the flattened view `name` of `axes` in the root mesh; `fully_shard` needs axes of one root mesh."""
    return mesh[tuple(axes)]._flatten(name)


def slice_mesh(mesh: DeviceMesh, axes: str | tuple[str, ...]) -> DeviceMesh:
    """Return `mesh[axes]` without the warning of torch before 2.13 that slicing flattened views is deprecated."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Slicing a flattened dim")
        return mesh[axes]


def get_group_timeout(group: dist.ProcessGroup | None = None) -> timedelta:
    """Return the timeout of a group's collectives (None: the default group); torch's group options are private."""
    group = group or dist.group.WORLD
    if group is None:
        raise MeshError("there is no process group. Open a world first.")
    options: Any = group._get_backend(group._device_types[0]).options
    # A group without communication has no options.
    timeout: timedelta = timedelta(seconds=600) if options is None else options._timeout
    return timeout


@contextmanager
def new_group_timeout(timeout: timedelta) -> Iterator[None]:
    """Set the timeout of all process groups created within the context; torch uses its own default for many of them."""
    known = set(list_process_groups())
    try:
        yield
    finally:
        for group in list_process_groups():
            if group not in known and dist.get_backend(group) != "fake":
                dist.distributed_c10d._set_pg_timeout(timeout, group)


def list_process_groups() -> list[dist.ProcessGroup]:
    return list(dist.distributed_c10d._world.pg_map)


def foreach_norm(tensors: Sequence[Tensor], norm_type: float, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Return the p-norm of each tensor in few kernel launches; `get_total_norm` combines them in their dtype."""
    return list(torch._foreach_norm(tensors, norm_type, dtype=dtype)) if tensors else []


def foreach_mul_(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply tensors, including local tensors of DTensors, in place by a 0-dim factor, in few kernel launches."""
    if tensors:
        torch._foreach_mul_(tensors, factor)


def foreach_copy_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)


def all_reduce(tensor: Tensor, op: str, group: dist.ProcessGroup) -> Tensor:
    """All-reduce with "sum" or "max". Functional, like the collectives below: torch.compile traces no others."""
    return funcol.wait_tensor(funcol.all_reduce(tensor.contiguous(), op, group))


def all_gather(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Concatenate the tensors of all ranks along `dim`; see `all_reduce`."""
    return funcol.wait_tensor(functional_all_gather(tensor.contiguous(), dim % tensor.dim(), group))


def reduce_scatter(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's shard along `dim` of the sum over all ranks; see `all_reduce`."""
    return funcol.wait_tensor(functional_reduce_scatter(tensor.contiguous(), "sum", dim % tensor.dim(), group))


def all_to_all(
    tensor: Tensor,
    group: dist.ProcessGroup,
    send_sizes: list[int] | None = None,
    receive_sizes: list[int] | None = None,
) -> Tensor:
    """Exchange chunks along the first dim, with these sizes by rank (None: equal ones); see `all_reduce`."""
    return funcol.wait_tensor(funcol.all_to_all_single(tensor.contiguous(), receive_sizes, send_sizes, group))


def is_sharded(placement: Placement) -> bool:
    """Return whether a placement shards; `is_shard` is False for the strided shards of `fully_shard` in torch 2.13."""
    return placement.is_shard() or isinstance(placement, _StridedShard)


def packed_shard(dim: int, parts: int) -> Placement:
    """Return the placement of `parts` equal parts, concatenated along `dim`, each of which is sharded separately."""
    return _StridedShard(dim, split_factor=parts)


def is_packed_shard(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor) and isinstance(tensor.placements[-1], _StridedShard)


def gather_packed(tensor: DTensor) -> DTensor:
    """Gather a `packed_shard` along the last mesh axis; torch before 2.13 cannot redistribute it. Collective."""
    mesh, placement = tensor.device_mesh, tensor.placements[-1]
    axis, dim, parts = mesh.ndim - 1, placement.dim, placement.split_factor
    ranks = mesh.shape[axis]
    if tensor.shape[dim] % (parts * ranks):
        raise StrategyError(
            f"{parts} packed parts of {tensor.shape[dim]} features cannot be gathered over {ranks} ranks: each must "
            f"divide evenly."
        )
    local = tensor.to_local()
    rows = all_gather(local.movedim(dim, 0), 0, mesh.get_group(axis))
    by_part = rows.unflatten(0, (ranks, parts, -1)).transpose(0, 1).flatten(0, 2).movedim(0, dim)
    placements = (*tensor.placements[:-1], Replicate())
    return DTensor.from_local(
        by_part.contiguous(), mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


# -- operators, identified by names that torch does not guarantee


def is_matmul(op: Any) -> bool:
    """Return whether an operator is a matrix product with weights; `_grouped_mm` is that of experts."""
    return str(op).removesuffix(".default") in ("aten.mm", "aten.addmm", "aten._grouped_mm")


@functools.cache
def is_attention(op: Any) -> bool:
    """Return whether an operator is a fused attention: a scaled_dot_product_attention variant or flex attention."""
    return str(op).startswith(("aten._scaled_dot_product_", "aten.scaled_dot_product_", "flex_attention"))


@functools.cache
def is_topk(op: Any) -> bool:
    """Return whether an operator is top-k, which routers use to select experts."""
    return str(op) == "aten.topk.default"


def is_collective(op: Any) -> bool:
    """Return whether an operator is a functional collective or its wait. FSDP's collectives (`c10d`) return nothing."""
    return str(op).startswith(("_c10d_functional.", "_c10d_functional_autograd.", "c10d_functional."))


def get_operator_name(operator: Any) -> str:
    return str(operator._schema.name)


def _arguments(operator: Any) -> Sequence[Any]:
    """Return the arguments in an operator's schema; higher-order operators have none."""
    return operator._schema.arguments if hasattr(operator, "_schema") else ()


def get_schema_argument_names(operator: Any) -> list[str]:
    return [argument.name for argument in _arguments(operator)]


@functools.cache
def get_mutated_arguments(operator: Any) -> tuple[int | str, ...]:
    """Return the positions, or the names of keyword-only arguments, that an operator mutates."""
    return tuple(
        argument.name if argument.kwarg_only else index
        for index, argument in enumerate(_arguments(operator))
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def draws_random_numbers(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operator call samples random numbers: it has torch's tag, and its probability is not 0."""
    if torch.Tag.nondeterministic_seeded not in getattr(operator, "tags", ()):
        return False
    for index, argument in enumerate(operator._schema.arguments):
        if argument.name in ("dropout_p", "p"):
            value = args[index] if index < len(args) else kwargs.get(argument.name, argument.default_value)
            return value != 0
    return True


def count_flops(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    """Count FLOPs of matrix products, convolutions and attention, which torch does not count on a CPU; 0 for others."""
    if is_attention(operator):
        return _count_attention_flops(operator, args, kwargs)
    name = _strip_overload(operator)
    tensors = [each for each in args if isinstance(each, Tensor)]
    if name in ("mm", "bmm", "_grouped_mm", "addmm", "baddbmm"):
        left = tensors[1] if name in ("addmm", "baddbmm") else tensors[0]
        # Groups share one dim of the operands, such as the rows that the experts' weight gradients sum over.
        groups = result.shape[0] if name == "_grouped_mm" and left.dim() == 2 and result.dim() == 3 else 1
        return 2 * int(result.numel()) * left.shape[-1] // groups
    if name in ("convolution", "_convolution"):
        return 2 * int(result.numel()) * tensors[1][0].numel()
    return 0


@functools.cache
def _strip_overload(operator: Any) -> str:
    return str(operator).removeprefix("aten.").split(".")[0].removesuffix("_")


def _count_attention_flops(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Count two products in forward and five in backward for each attending pair of a query and a key.

    Flex attention has no schema; it takes query, key and value first, and has a mask.
    """
    names = get_schema_argument_names(operator)
    arguments = {**dict(zip(names or ("query", "key", "value"), args, strict=False)), **kwargs}
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    mask = arguments.get("attn_mask") if "attn_mask" in names else arguments.get("attn_bias")
    queries, keys = query.shape[-2], key.shape[-2]
    # Query i attends to the first `before + i + 1` keys.
    before = keys - queries
    # Causal kernels without a mask argument align the last query with the last key.
    if bool(arguments.get("is_causal")):
        before = before if {"attn_mask", "attn_bias"}.isdisjoint(names) else 0
    elif mask is None and names:
        before = keys
    first = max(0, -before)
    # Queries with a growing number of keys, and queries with all keys.
    growing = max(0, min(queries, keys - before) - first)
    least = before + first + 1
    pairs = growing * least + growing * (growing - 1) // 2 + max(0, queries - first - growing) * keys
    of_query, of_value = (3, 2) if "backward" in str(operator) else (1, 1)
    widths = of_query * query.shape[-1] + of_value * value.shape[-1]
    return 2 * int(query.shape[:-2].numel()) * pairs * int(widths)


# -- compilation, modules, autograd


def compile_with_limit(function: Callable[..., Any], *, backend: str, recompile_limit: int) -> Callable[..., Any]:
    """Call `torch.compile` with `recompile_limit`; if it lacks that argument, raise the process-wide limit."""
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        return torch.compile(function, backend=backend, recompile_limit=recompile_limit)
    torch._dynamo.config.recompile_limit = max(recompile_limit, torch._dynamo.config.recompile_limit)
    return torch.compile(function, backend=backend)


@functools.cache
def compiles_attention_in_float64() -> bool:
    """Return whether compiled attention backwards work in float64: torch before 2.13 assumes a float32 log-sum-exp."""
    one = torch.empty(1, 1, 1, 1, dtype=torch.float64, device="meta")
    _, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(one, one, one)
    return bool(logsumexp.dtype == torch.float64)


def get_event_category(event: Any) -> str:
    """Return an event's Kineto category, such as "cpu_op"; without `activity_type`, derive it from device and name."""
    if hasattr(event, "activity_type"):
        return str(event.activity_type())
    if event.device_type() == torch.autograd.DeviceType.CPU:
        if event.is_user_annotation():
            return "user_annotation"
        return "cuda_runtime" if _CUDA_CALL.match(event.name()) else "cpu_op"
    copies = {"Memcpy": "gpu_memcpy", "Memset": "gpu_memset"}
    return "gpu_user_annotation" if event.is_user_annotation() else copies.get(event.name()[:6], "kernel")


_CUDA_CALL = re.compile(r"cuda?[A-Z]|hip[A-Z]")


def compile_function(function: Callable[..., Any], *, backend: str, max_versions: int) -> Callable[..., Any]:
    """Call `torch.compile` for up to `max_versions` versions, a limit that all functions of the same source share."""
    # Tensor parallelism records its copies and drops them when the block ends. Within activation checkpointing torch
    # traces that only if this private setting says that backward need not repeat it.
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    return compile_with_limit(function, backend=backend, recompile_limit=max_versions)


def get_own_parameters(module: nn.Module) -> dict[str, Any]:
    """Return the dict of a module's own parameters; unlike `setattr`, it accepts plain tensors."""
    return module._parameters


def queue_after_backward(callback: Callable[[], None]) -> None:
    """Call a function at the end of the current backward, in the queue that `fully_shard` uses; it may raise."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def get_storage_key(tensor: Tensor) -> tuple[int, Any]:
    """Return a key that all views of one storage share, and the object that keeps the key valid while it is alive."""
    storage = tensor.untyped_storage()
    return storage._cdata, storage


def get_version(tensor: Tensor) -> int:
    """Return autograd's count of in-place writes to a tensor or to a view of the same memory."""
    return tensor._version


def is_profiling() -> bool:
    """Return whether a torch profiler is active in this process; torch has no public check."""
    return bool(torch.autograd._profiler_enabled())


def record_if_profiling(name: str) -> AbstractContextManager[object]:
    """Label a range in the trace of the active torch profiler, if any."""
    return record_function(name) if is_profiling() else nullcontext()


def is_plain_tensor(tensor: Tensor) -> bool:
    """Return whether a tensor is a plain tensor, a parameter or a FakeTensor, and not another subclass."""
    return type(tensor) in (Tensor, nn.Parameter, FakeTensor)


def is_propagating_shapes() -> bool:
    """Return whether torch runs an operator only for its shapes, as DTensor does for an operator that it sees first."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None

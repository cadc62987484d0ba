"""Private and version-dependent names of torch."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement, _StridedShard

# Sees every operator that runs, which `torch.overrides` cannot inside of torch's own functions. The module has a
# private name, though torch's own documentation teaches the class.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

from ..base.errors import MeshError, StrategyError
from .torch_versions import compile_with_limit, functional_all_gather, functional_reduce_scatter

GLOO_THREAD = "pt_gloo_runloop"
"""How the system names threads that run gloo's collectives. Private because torch does not tell of them."""


class UncompiledMode(TorchDispatchMode):
    """A mode under which nothing is compiled, so that torch need not keep its compiler away from each operator."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def flatten_mesh(mesh: DeviceMesh, axes: Sequence[str], name: str) -> DeviceMesh:
    """Register the view `name` over `axes` in the root mesh, so that it can be sliced together with other axes.

    Private because torch has no public call for it; `fully_shard` needs views and axes of one root mesh.
    """
    return mesh[tuple(axes)]._flatten(name)


def slice_mesh(mesh: DeviceMesh, axes: str | tuple[str, ...]) -> DeviceMesh:
    """`mesh[axes]`, without the warning of torch before 2.13 that it will soon refuse flattened views."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Slicing a flattened dim")
        return mesh[axes]


def group_timeout(group: dist.ProcessGroup | None = None) -> timedelta:
    """How long collectives of a group wait for peers; None: of the group of all ranks.

    Private, since torch tells a group's options to nobody.
    """
    group = group or dist.group.WORLD
    if group is None:
        raise MeshError("there is no process group. Open a world first.")
    options: Any = group._get_backend(group._device_types[0]).options
    if options is None:
        # A group that sends nothing.
        return timedelta(seconds=600)
    timeout: timedelta = options._timeout
    return timeout


@contextmanager
def groups_with_timeout(timeout: timedelta) -> Iterator[None]:
    """Give this timeout to all process groups that are made in the context, by whomever.

    torch gives its own (30 minutes; NCCL: 10) to groups of a `DeviceMesh` and of packages that ask for none; what sets
    it afterwards, and the registry of groups, are private.
    """
    known = set(live_groups())
    try:
        yield
    finally:
        for group in live_groups():
            if group not in known and dist.get_backend(group) != "fake":
                dist.distributed_c10d._set_pg_timeout(timeout, group)


def live_groups() -> list[dist.ProcessGroup]:
    """The process groups that this rank is in; see `groups_with_timeout`."""
    return list(dist.distributed_c10d._world.pg_map)


def foreach_norm(tensors: Sequence[Tensor], norm_type: float, dtype: torch.dtype | None = None) -> list[Tensor]:
    """The p-norm of each tensor, in few kernel launches; computed in `dtype`, or in the tensors' own.

    `torch.nn.utils.get_total_norm` does the same, but puts the norms together in the tensors' dtype.
    """
    return list(torch._foreach_norm(tensors, norm_type, dtype=dtype)) if tensors else []


def foreach_mul_(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply all tensors in place by a 0-dim factor, in few kernel launches.

    `torch.nn.utils.clip_grads_with_norm_` does the same, but takes parameters, not the local parts of DTensors.
    """
    if tensors:
        torch._foreach_mul_(tensors, factor)


def foreach_copy_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors into others of their shapes, and perhaps other dtypes, in few kernel launches."""
    if targets:
        torch._foreach_copy_(targets, sources)


def all_reduce(tensor: Tensor, op: str, group: dist.ProcessGroup) -> Tensor:
    """A new tensor: the "sum" or "max" over the ranks of the group.

    Functional collectives, here and below, since the public ones work in place and cannot be traced by torch.compile
    within autograd functions.
    """
    return funcol.wait_tensor(funcol.all_reduce(tensor.contiguous(), op, group))


def all_gather(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """The tensors of all ranks of the group, one behind the other along `dim`; see `all_reduce`."""
    return funcol.wait_tensor(functional_all_gather(tensor.contiguous(), dim % tensor.dim(), group))


def reduce_scatter(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's part along `dim`, which the group divides, of the sum over its ranks; see `all_reduce`."""
    return funcol.wait_tensor(functional_reduce_scatter(tensor.contiguous(), "sum", dim % tensor.dim(), group))


def all_to_all(
    tensor: Tensor, group: dist.ProcessGroup, sends: list[int] | None = None, receives: list[int] | None = None
) -> Tensor:
    """The first dim in parts, one to each rank of the group and one from each; see `all_reduce`.

    Args:
        sends, receives: lengths of the parts, by rank; None: all are equal.
    """
    return funcol.wait_tensor(funcol.all_to_all_single(tensor.contiguous(), receives, sends, group))


def is_sharded(placement: Placement) -> bool:
    """Whether a placement divides the tensor; `Placement.is_shard` answers False for torch 2.13's strided shards,
    which `fully_shard` makes of parameters that tensor parallelism shards along the same dim.
    """
    return placement.is_shard() or isinstance(placement, _StridedShard)


def packed_shard(dim: int, parts: int) -> Placement:
    """The placement of `parts` equal parts that lie one behind the other along `dim`, each of which is sharded.

    Private because torch has no public placement for it.
    """
    return _StridedShard(dim, split_factor=parts)


def is_packed(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor that `packed_shard` divides along its last axis."""
    return isinstance(tensor, DTensor) and isinstance(tensor.placements[-1], _StridedShard)


def gather_packed(tensor: DTensor) -> DTensor:
    """Gather a tensor along its last axis, along which `packed_shard` divides it evenly. Collective.

    torch 2.11 to 2.12 take every `_StridedShard` for the trace of another axis that shards the same dim, and refuse to
    redistribute one that is none.
    """
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


def is_matrix_product(op: Any) -> bool:
    """Whether an operator is a matrix product of weights, for selective recomputation.

    Operators are known by their names, which torch does not promise to keep. `_grouped_mm` is that of experts.
    """
    return str(op).removesuffix(".default") in ("aten.mm", "aten.addmm", "aten._grouped_mm")


@functools.cache
def is_attention(op: Any) -> bool:
    """Whether an operator is a whole attention: any variant of scaled_dot_product_attention, or flex attention."""
    return str(op).startswith(("aten._scaled_dot_product_", "aten.scaled_dot_product_", "flex_attention"))


@functools.cache
def is_choice(op: Any) -> bool:
    """Whether an operator chooses the largest of candidates, values and indices, as routers choose experts."""
    return str(op) == "aten.topk.default"


def is_communication(op: Any) -> bool:
    """Whether an operator is a functional collective or waits for one; those of tensor parallelism are.

    FSDP's own (`c10d`) write into buffers and are no results to be held.
    """
    return str(op).startswith(("_c10d_functional.", "_c10d_functional_autograd.", "c10d_functional."))


def compiled(function: Callable[..., Any], *, backend: str, versions: int) -> Callable[..., Any]:
    """`torch.compile` that may keep so many versions of a function.

    torch shares one limit between all functions with the same source (the blocks of a stack), 8 by default, beyond
    which it goes on uncompiled with a warning.
    """
    # Tensor parallelism writes down what it has copied, and forgets it when the block ends: also within a checkpoint,
    # where torch traces that only if told, by a setting of a private module, that backward need not do it again.
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    return compile_with_limit(function, backend=backend, recompile_limit=versions)


def own_parameters(module: nn.Module) -> dict[str, Any]:
    """Where a module keeps its own parameters; what is put there, a plain tensor too, its forward sees.

    Private because `setattr` and `register_parameter` take parameters alone, and `swap_tensors` exchanges values for
    all who hold the tensor.
    """
    return module._parameters


def after_backward(callback: Callable[[], None]) -> None:
    """Call a function at the end of the backward that runs now, after what was queued before; it may raise.

    Private because torch's public hooks belong to tensors, of which none is known to come last. `fully_shard` queues
    its own end of a backward by the same method.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def storage_of(tensor: Tensor) -> tuple[int, Any]:
    """A key that is the same for all views of one storage, and what must be kept alive for it to stay so.

    `_cdata` is private; the Python object of a storage is not always the same.
    """
    storage = tensor.untyped_storage()
    return storage._cdata, storage


def version_of(tensor: Tensor) -> int:
    """How often a tensor, or a view of the same memory, was written into; `_version` is how autograd counts it."""
    return tensor._version


def name_of(operator: Any) -> str:
    """Of an operator, without that of its overload, such as "aten::normal_"; its schema is private."""
    return str(operator._schema.name)


def names_of_arguments(operator: Any) -> list[str]:
    """Of an operator; none of those of higher order, which have no schema."""
    return [argument.name for argument in operator._schema.arguments] if hasattr(operator, "_schema") else []


@functools.cache
def written_arguments(operator: Any) -> tuple[int | str, ...]:
    """Positions, or names of keyword-only arguments, that an operator writes into.

    `_schema` is private and is what torch's own dispatch modes read; operators of higher order have none.
    """
    arguments = operator._schema.arguments if hasattr(operator, "_schema") else ()
    return tuple(
        argument.name if argument.kwarg_only else index
        for index, argument in enumerate(arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def draws_random_numbers(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of an operator draws random numbers.

    Operators carry a tag for it; a probability of 0 is a matter of the arguments, which `_schema` names.
    """
    if torch.Tag.nondeterministic_seeded not in getattr(operator, "tags", ()):
        return False
    for index, argument in enumerate(operator._schema.arguments):
        if argument.name in ("dropout_p", "p"):
            given = args[index] if index < len(args) else kwargs.get(argument.name, argument.default_value)
            return given != 0
    return True

"""Wrap a model with individually chosen units, sizes and dtypes, which the package's public calls do not accept."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.plugin import Mesh

from ..config import ZERO_STAGES, MegatronFSDPConfig
from .cpu_torch import allow_float64_buffers
from .package import import_package, import_submodule

_BUCKET_NUMEL = 40_000_000
"""Megatron-Core's default bucket size. With the package's None, disable_bucketing would have no effect."""
_COMMUNICATION_UNIT_NUMEL = 1_000_000_000
"""The package's smallest default for suggested_communication_unit_size."""

SHARD_SIZE_COLLECTIVES = ("validate_uneven_dtensor", "update_uneven_dtensor_chunk_metadata")
"""The package's functions that query other ranks' shard sizes; see `_skip_shard_checks`."""


class _UnitClass(type):
    """A class whose instances are the chosen modules: the package only accepts units as classes."""

    modules: Sequence[nn.Module]

    def __instancecheck__(cls, module: Any) -> bool:
        return any(module is each for each in cls.modules)


def wrap_model(
    model: nn.Module, mesh: Mesh, config: MegatronFSDPConfig, *, units: Sequence[nn.Module], policy: Any
) -> Any:
    """Shard a model in place and return its MegatronFSDP wrapper, in the sharded state; see `wrapped_model`.

    `fully_shard_model` has no arguments for suggested_communication_unit_size and bucket size, and divides by the
    number of units, which may be 0.
    """
    ddp_config = _build_ddp_config(config)
    _avoid_split_rows(model, mesh, ddp_config, units)
    dtypes = {parameter.dtype for parameter in model.parameters()} | {policy.main_params_dtype, policy.main_grads_dtype}
    with (
        allow_float64_buffers() if torch.float64 in dtypes else nullcontext(),
        nullcontext() if mesh.world.is_real else _skip_shard_checks(),
    ):
        fsdp = _build_wrapper_class()(
            model,
            _build_distributed_index(mesh, shards_outer=config.is_outer_sharded),
            ddp_config,
            policy,
            # Without units, the package allocates no buffers for them.
            fsdp_unit_modules=[_UnitClass("Unit", (), {"modules": tuple(units)})] if units else [],
            disable_bucketing=config.disable_bucketing,
            device=mesh.device,
            # No gradient scaling, except with averages, for which its value is not used.
            calculate_per_token_loss=not ddp_config.average_in_collective,
            sync_model_each_microbatch=False,
            nccl_ub=ddp_config.nccl_ub,
            fsdp_double_buffer=ddp_config.fsdp_double_buffer,
            disable_symmetric_registration=ddp_config.disable_symmetric_registration,
        )
    for group in fsdp.param_and_grad_buffer.parameter_groups:
        # The package omits this: without it, ranks of dp_shard would sum where those of dp_replicate average.
        if group.hfsdp_helper_gbuf is not None:
            group.hfsdp_helper_gbuf.gradient_scaling_factor = group.main_grad_buffer.gradient_scaling_factor
    return fsdp


@contextmanager
def _skip_shard_checks() -> Iterator[None]:
    """Skip the package's checks of all ranks' shards in planning, where a fake world returns this rank's for all."""
    module = import_submodule("param_and_grad_buffer")
    originals = {name: getattr(module, name) for name in SHARD_SIZE_COLLECTIVES}
    for name in SHARD_SIZE_COLLECTIVES:
        setattr(module, name, lambda _: None)
    try:
        yield
    finally:
        for name, function in originals.items():
            setattr(module, name, function)


def _avoid_split_rows(model: nn.Module, mesh: Mesh, ddp_config: Any, units: Sequence[nn.Module]) -> None:
    """Put each parameter whose rows the package would split across shards into a separate bucket.

    A bucket is split at multiples of a number that row sizes divide. But parameters with fewer elements than that, such
    as low-rank adapters of matrices with different widths, may cross a split. A parameter with `shared_embedding` gets
    a separate bucket, which also separates the parameters before and after it.
    """
    unit_by_parameter = {id(parameter): number for number, unit in enumerate(units) for parameter in unit.parameters()}
    groups: dict[Any, list[nn.Parameter]] = defaultdict(list)
    for name, parameter in model.named_parameters():
        kind = (unit_by_parameter.get(id(parameter)), parameter.dtype, parameter.requires_grad, ".experts." in name)
        groups[kind].append(parameter)
    sharded = mesh.degrees.dp_shard * mesh.degrees.cp
    for group in groups.values():
        pending_runs = [group]
        while pending_runs:
            run = pending_runs.pop()
            shapes = [parameter.shape for parameter in run]
            split_indices = [
                _find_first_split_row(shapes, parts, ddp_config)
                for parts in {sharded, sharded * mesh.degrees.dp_replicate}
            ]
            for index in [each for each in split_indices if each is not None][:1]:
                run[index].shared_embedding = True
                pending_runs += [run[:index], run[index + 1 :]]


def _find_first_split_row(shapes: Sequence[torch.Size], num_parts: int, ddp_config: Any) -> int | None:
    """Return the first parameter in a bucket that the package would split within a row, into `num_parts` shards.

    Like the package, sort parameters by row size, find the least common multiple of the row sizes of those that are not
    small, and lay them out.
    """
    order = sorted(range(len(shapes)), key=lambda index: shapes[index][1:].numel(), reverse=True)
    chunk_factor = 1
    for index in order:
        if shapes[index].numel() >= chunk_factor:
            chunk_factor = math.lcm(chunk_factor, shapes[index][1:].numel())
    build_index = import_submodule("param_and_grad_buffer").build_data_parallel_buffer_index
    ordered = [shapes[index] for index in order]
    item_ranges, bucket, _ = build_index(ordered, 0, num_parts, True, ddp_config, chunk_size_factor=chunk_factor)
    shard = bucket.size // num_parts
    for number, item in item_ranges.items():
        begin, row = item.global_data_index, ordered[number][1:].numel()
        cuts = range(-(-(begin + 1) // shard) * shard, begin + item.size, shard) if shard else ()
        if any((cut - begin) % row for cut in cuts):
            return order[number]
    return None


def _build_package_mesh(mesh: Mesh, sharded: list[str]) -> DeviceMesh:
    """Build a mesh of `sharded` and one-rank `pp` from existing groups: torch 2.11 and 2.12 slice only in order."""
    names = (*sharded, "pp")
    ranks = mesh[tuple(sharded)].mesh if len(sharded) > 1 else mesh[sharded[0]].mesh
    groups = [mesh.group(name) for name in names]
    return DeviceMesh.from_group(groups, mesh.device.type, ranks.unsqueeze(-1), mesh_dim_names=names)


def _build_distributed_index(mesh: Mesh, *, shards_outer: bool) -> Any:
    is_hybrid = mesh.degrees.dp_replicate > 1
    group = mesh.group("dp_cp") if is_hybrid else None
    shard_axis = "dp_shard_cp" if mesh.degrees.cp > 1 else "dp_shard"
    package_mesh = _build_package_mesh(mesh, ["dp_replicate", shard_axis] if is_hybrid else [shard_axis])
    return import_package().FSDPDistributedIndex(
        package_mesh,
        dp_shard_dim=shard_axis,
        dp_outer_dim="dp_replicate" if is_hybrid else None,
        # Required. Tensor parallelism is meshwright's: the package sees this rank's shards as a full model, and an axis
        # of one rank.
        tp_dim="pp",
        hybrid_fsdp_group=group,
        # Parameters with ".experts." in their names use a separate mesh; without one, they use the whole world.
        expt_device_mesh=package_mesh,
        hybrid_fsdp_expt_group=group,
        hsdp_outer_dp_shard=shards_outer,
    )


def _build_ddp_config(config: MegatronFSDPConfig) -> Any:
    # Megatron-Core's class or the package's own, depending on what is installed.
    return import_submodule("megatron_fsdp").DistributedDataParallelConfig(
        overlap_grad_reduce=True,
        bucket_size=_BUCKET_NUMEL,
        data_parallel_sharding_strategy=ZERO_STAGES[config.zero_stage],
        outer_dp_sharding_strategy="optim" if config.is_outer_sharded else "no_shard",
        overlap_param_gather=config.overlap_param_gather,
        average_in_collective=config.average_in_collective,
        gradient_reduce_div_fusion=config.gradient_reduce_div_fusion,
        # Required, since the package would otherwise divide by the number of units.
        suggested_communication_unit_size=config.suggested_communication_unit_size or _COMMUNICATION_UNIT_NUMEL,
        nccl_ub=config.nccl_ub,
        fsdp_double_buffer=config.fsdp_double_buffer or config.nccl_ub,
        disable_symmetric_registration=config.disable_symmetric_registration,
    )


@functools.cache
def _build_wrapper_class() -> Any:
    """Return the package's MegatronFSDP, extended to models in which any number of modules share a parameter."""
    inner: Any = import_submodule("megatron_fsdp")

    class MegatronFSDP(inner.MegatronFSDP):
        def _reestablish_shared_weights(self, old_params: dict[str, Any], new_params: dict[str, Any]) -> None:
            # The package updates one more module on each call, and stops after the first call.
            stale = {id(p) for p in old_params.values()} - {id(p) for p in new_params.values()}
            while any(id(parameter) in stale for parameter in self.module.parameters()):
                super()._reestablish_shared_weights(old_params, new_params)

    return MegatronFSDP

"""Wrap a model with units chosen one by one, and sizes and dtypes that the package's shorter calls leave out."""

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
"""Megatron-Core's default size of a bucket; the package's None would leave disable_bucketing without effect."""
_COMMUNICATION_UNIT_NUMEL = 1_000_000_000
"""The package's own least suggested_communication_unit_size."""

SHARD_SIZE_COLLECTIVES = ("validate_uneven_dtensor", "update_uneven_dtensor_chunk_metadata")
"""The package's functions that ask other ranks for the sizes of their shards; see `_skip_shard_checks`."""


class _UnitClass(type):
    """A class whose instances are the modules that were chosen: the package takes units as classes only."""

    modules: Sequence[nn.Module]

    def __instancecheck__(cls, module: Any) -> bool:
        return any(module is each for each in cls.modules)


def wrap_model(
    model: nn.Module, mesh: Mesh, config: MegatronFSDPConfig, *, units: Sequence[nn.Module], policy: Any
) -> Any:
    """Shard a model in place and return the MegatronFSDP around it, in the sharded state; see `wrapped`.

    `fully_shard_model` has no argument for suggested_communication_unit_size, nor for the size of a bucket, and divides
    by the number of units, which may be 0.
    """
    theirs = _build_ddp_config(config)
    _avoid_split_rows(model, mesh, theirs, units)
    used = {parameter.dtype for parameter in model.parameters()} | {policy.main_params_dtype, policy.main_grads_dtype}
    with (
        allow_float64_buffers() if torch.float64 in used else nullcontext(),
        nullcontext() if mesh.world.is_real else _skip_shard_checks(),
    ):
        fsdp = _build_wrapper_class()(
            model,
            _build_distributed_index(mesh, shards_outer=config.is_outer_sharded),
            theirs,
            policy,
            # Without units, it has no buffers for them.
            fsdp_unit_modules=[_UnitClass("Unit", (), {"modules": tuple(units)})] if units else [],
            disable_bucketing=config.disable_bucketing,
            device=mesh.device,
            # No factor on gradients but for averages, where its value is not used.
            calculate_per_token_loss=not theirs.average_in_collective,
            sync_model_each_microbatch=False,
            nccl_ub=theirs.nccl_ub,
            fsdp_double_buffer=theirs.fsdp_double_buffer,
            disable_symmetric_registration=theirs.disable_symmetric_registration,
        )
    for group in fsdp.param_and_grad_buffer.parameter_groups:
        # The package forgets this: without it, ranks of dp_shard sum where those of dp_replicate average.
        if group.hfsdp_helper_gbuf is not None:
            group.hfsdp_helper_gbuf.gradient_scaling_factor = group.main_grad_buffer.gradient_scaling_factor
    return fsdp


@contextmanager
def _skip_shard_checks() -> Iterator[None]:
    """Skip the package's checks of all ranks' shards for a plan, whose world would return this rank's for all."""
    module = import_submodule("param_and_grad_buffer")
    before = {name: getattr(module, name) for name in SHARD_SIZE_COLLECTIVES}
    for name in SHARD_SIZE_COLLECTIVES:
        setattr(module, name, lambda _: None)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(module, name, function)


def _avoid_split_rows(model: nn.Module, mesh: Mesh, ddp_config: Any, units: Sequence[nn.Module]) -> None:
    """Give a bucket of its own to each parameter of which the package would cut a row in two.

    A bucket is cut at multiples of a number that rows divide, but parameters with fewer elements than that (adapters of
    a low rank on matrices of different widths) may lie across a cut. A parameter with `shared_embedding` has a bucket
    of its own, which separates the parameters before and after it.
    """
    unit_of = {id(parameter): number for number, unit in enumerate(units) for parameter in unit.parameters()}
    groups: dict[Any, list[nn.Parameter]] = defaultdict(list)
    for name, parameter in model.named_parameters():
        kind = (unit_of.get(id(parameter)), parameter.dtype, parameter.requires_grad, ".experts." in name)
        groups[kind].append(parameter)
    sharded = mesh.degrees.dp_shard * mesh.degrees.cp
    for group in groups.values():
        open_runs = [group]
        while open_runs:
            run = open_runs.pop()
            shapes = [parameter.shape for parameter in run]
            cut = [
                _find_first_split_row(shapes, parts, ddp_config)
                for parts in {sharded, sharded * mesh.degrees.dp_replicate}
            ]
            for index in [each for each in cut if each is not None][:1]:
                run[index].shared_embedding = True
                open_runs += [run[:index], run[index + 1 :]]


def _find_first_split_row(shapes: Sequence[torch.Size], num_parts: int, ddp_config: Any) -> int | None:
    """Return the first parameter of a bucket that the package would cut within a row, into so many parts.

    As the package does, sort them by the length of their rows, find the number that the rows of all that are not small
    divide, and lay them out.
    """
    order = sorted(range(len(shapes)), key=lambda index: shapes[index][1:].numel(), reverse=True)
    between = 1
    for index in order:
        if shapes[index].numel() >= between:
            between = math.lcm(between, shapes[index][1:].numel())
    lay_out = import_submodule("param_and_grad_buffer").build_data_parallel_buffer_index
    ordered = [shapes[index] for index in order]
    places, bucket, _ = lay_out(ordered, 0, num_parts, True, ddp_config, chunk_size_factor=between)
    shard = bucket.size // num_parts
    for number, place in places.items():
        begin, row = place.global_data_index, ordered[number][1:].numel()
        cuts = range(-(-(begin + 1) // shard) * shard, begin + place.size, shard) if shard else ()
        if any((cut - begin) % row for cut in cuts):
            return order[number]
    return None


def _build_package_mesh(mesh: Mesh, sharded: list[str]) -> DeviceMesh:
    """Make a mesh of `sharded` and `pp`, of one rank, over existing groups: torch 2.11 and 2.12 slice only in order."""
    names = (*sharded, "pp")
    ranks = mesh[tuple(sharded)].mesh if len(sharded) > 1 else mesh[sharded[0]].mesh
    groups = [mesh.group(name) for name in names]
    return DeviceMesh.from_group(groups, mesh.device.type, ranks.unsqueeze(-1), mesh_dim_names=names)


def _build_distributed_index(mesh: Mesh, *, shards_outer: bool) -> Any:
    hybrid = mesh.degrees.dp_replicate > 1
    group = mesh.group("dp_cp") if hybrid else None
    shards = "dp_shard_cp" if mesh.degrees.cp > 1 else "dp_shard"
    own = _build_package_mesh(mesh, ["dp_replicate", shards] if hybrid else [shards])
    return import_package().FSDPDistributedIndex(
        own,
        dp_shard_dim=shards,
        dp_outer_dim="dp_replicate" if hybrid else None,
        # Must be given. Tensor parallelism is ours: the package sees each rank's part as a whole model, and an axis of
        # one rank.
        tp_dim="pp",
        hybrid_fsdp_group=group,
        # Parameters whose names contain ".experts." go by a mesh of their own; without one, by the whole world.
        expt_device_mesh=own,
        hybrid_fsdp_expt_group=group,
        hsdp_outer_dp_shard=shards_outer,
    )


def _build_ddp_config(config: MegatronFSDPConfig) -> Any:
    # Whether Megatron-Core's class or the package's own: it depends on what is installed.
    return import_submodule("megatron_fsdp").DistributedDataParallelConfig(
        overlap_grad_reduce=True,
        bucket_size=_BUCKET_NUMEL,
        data_parallel_sharding_strategy=ZERO_STAGES[config.zero_stage],
        outer_dp_sharding_strategy="optim" if config.is_outer_sharded else "no_shard",
        overlap_param_gather=config.overlap_param_gather,
        average_in_collective=config.average_in_collective,
        gradient_reduce_div_fusion=config.gradient_reduce_div_fusion,
        # Given, or else the package divides by the number of units.
        suggested_communication_unit_size=config.suggested_communication_unit_size or _COMMUNICATION_UNIT_NUMEL,
        nccl_ub=config.nccl_ub,
        fsdp_double_buffer=config.fsdp_double_buffer or config.nccl_ub,
        disable_symmetric_registration=config.disable_symmetric_registration,
    )


@functools.cache
def _build_wrapper_class() -> Any:
    """Return the package's MegatronFSDP, for models in which any number of modules share a parameter."""
    inner: Any = import_submodule("megatron_fsdp")

    class MegatronFSDP(inner.MegatronFSDP):
        def _reestablish_shared_weights(self, old_params: dict[str, Any], new_params: dict[str, Any]) -> None:
            # The package gives the new parameter to one more module each time, and stops after the first.
            stale = {id(p) for p in old_params.values()} - {id(p) for p in new_params.values()}
            while any(id(parameter) in stale for parameter in self.module.parameters()):
                super()._reestablish_shared_weights(old_params, new_params)

    return MegatronFSDP

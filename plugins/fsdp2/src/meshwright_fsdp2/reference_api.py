"""Functions with the reference's names and arguments, for hand-written training loops on a plain DeviceMesh.

They shard and reduce gradients like `FSDP2Manager`: by SUM over the ranks, not by torch's mean ([Note: the gradient
rule] in `meshwright.strategy.contract`). So divide the loss of each rank by the token count of the global batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy

from meshwright.plugin import (
    CheckpointMode,
    DeferredWeights,
    MeshError,
    ModelError,
    apply_tensor_parallel,
    check_trainable,
    checkpoint_blocks,
    has_meta_tensors,
    infer_layout,
    load_weights,
    materialize,
    model_layout,
    sync_rng,
    warn,
)

from ._compat import keep_unsharded_after_forward
from .config import FSDP2Config
from .sharding import shard_units
from .unit_options import UnitOptions, build_offload_policy
from .units import find_nested_unit_modules


def fsdp2_strategy_parallelize(
    model: nn.Module,
    device_mesh: DeviceMesh,
    param_dtype: torch.dtype = torch.bfloat16,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: CPUOffloadPolicy | None = None,
    sequence_parallel: bool = False,
    activation_checkpointing: bool | CheckpointMode = False,
    cpu_offload: bool = False,
    tp_shard_plan: dict[str, Any] | str | None = None,
    dp_mesh_name: str | tuple[str, ...] = "data_parallel",
    tp_mesh_name: str = "tensor_parallel",
    dp_cp_mesh_name: str = "dp_cp",
) -> nn.Module:
    """Shard `model` in place along the named axes of a mesh.

    Args:
        model: with the same weights on all ranks; on the meta device, all ranks initialize it like rank 0.
        device_mesh: a mesh with an axis named `dp_mesh_name`, and optionally the other axes.
        param_dtype: compute dtype if `mp_policy` is None. Reductions and outputs are at least float32.
        mp_policy: mixed precision; its `output_dtype` applies to the full model.
        offload_policy: keep shards in CPU memory.
        sequence_parallel: see FSDP2Config; needs an axis `tp_mesh_name` with 2 or more ranks.
        activation_checkpointing: True or "full", or "selective".
        cpu_offload: the same as an `offload_policy`, with pinned memory if there is an accelerator.
        tp_shard_plan: tensor-parallel plan, or its import path. None: the model's own.
        dp_mesh_name: the axis to shard over; a pair (replicate, shard) for HSDP.
        tp_mesh_name: the axis of tensor parallelism.
        dp_cp_mesh_name: the axis or view to shard over instead, if the mesh has it.

    Raises:
        MeshError: the mesh has no axis of that name, or an axis with 2 or more ranks that is not named.
        ModelError: the model cannot be trained this way.
        StrategyError: memory is pinned on a CPU; or, from the first `backward()`, the plan misses a parameter.
    """
    dp_mesh, tp_mesh = _select_meshes(device_mesh, dp_mesh_name, tp_mesh_name, dp_cp_mesh_name)
    if tp_mesh is None and (sequence_parallel or tp_shard_plan is not None) and device_mesh.get_rank() == 0:
        warn(
            f"sequence_parallel and tp_shard_plan have no effect here: no axis {tp_mesh_name!r} has 2 or more ranks.",
            stacklevel=2,
        )
    wide_dtype = torch.promote_types(param_dtype, torch.float32)
    policy = mp_policy or MixedPrecisionPolicy(param_dtype, reduce_dtype=wide_dtype, output_dtype=wide_dtype)
    if cpu_offload and offload_policy is None:
        offload_policy = CPUOffloadPolicy(pin_memory=device_mesh.device_type != "cpu")
    offload = build_offload_policy(FSDP2Config(offload_policy=offload_policy), torch.device(device_mesh.device_type))
    options = UnitOptions(dp_mesh, policy, offload)
    check_trainable(model)
    with _init_weights_after_sharding(model, device_mesh.device_type, options):
        layout, tensor_parallel = model_layout(model), None
        if tp_mesh is not None:
            separate = find_nested_unit_modules(model, layout)
            tensor_parallel = apply_tensor_parallel(
                model, tp_mesh, tp_shard_plan, sequence_parallel=sequence_parallel, separate_modules=separate
            )
        checkpoint_blocks(model, layout, activation_checkpointing)
        shard_units(model, layout, options, tensor_parallel=tensor_parallel)
        if tensor_parallel is not None:
            tensor_parallel.check_first_backward(model)
    return model


def apply_fsdp_sharding_recursively(
    module: nn.Module,
    mesh: DeviceMesh,
    mp_policy: MixedPrecisionPolicy | None,
    offload_policy: OffloadPolicy | None = None,
) -> None:
    """Shard the items of each outermost ModuleList in `module` in place. The caller shards the remaining modules.

    Items are blocks of a model or plain layers; for a list or dict within a list, its items are sharded. The last item
    of each list keeps its unsharded parameters after forward, since its backward comes first. Parameters that items
    share with modules outside of the lists are not sharded. Parameters that only items share form a unit.

    Args:
        module: a model, or a ModuleList itself.
        mesh: one axis to shard over, or (replicate, shard).
        mp_policy: mixed precision; a block's output keeps its dtype.
        offload_policy: whether shards are in CPU memory.

    Raises:
        ModelError: an item has trainable parameters with several dtypes, or has no forward.
    """
    root = nn.ModuleDict({"blocks": module}) if isinstance(module, nn.ModuleList) else module
    options = UnitOptions(mesh, mp_policy or MixedPrecisionPolicy(), offload_policy or OffloadPolicy())
    layout = replace(infer_layout(root), stacks=tuple(_find_module_lists(root)))
    shard_units(root, layout, options, shard_root=False)


def _find_module_lists(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, ...]]:
    """Yield the names of the items to shard of each outermost ModuleList with parameters."""
    for name, child in module.named_children():
        if not isinstance(child, nn.ModuleList):
            yield from _find_module_lists(child, f"{prefix}{name}.")
        elif members := tuple(_list_members(child, f"{prefix}{name}.")):
            yield members


def _list_members(container: nn.Module, prefix: str) -> Iterator[str]:
    for name, member in container.named_children():
        if isinstance(member, nn.ModuleList | nn.ModuleDict):
            yield from _list_members(member, f"{prefix}{name}.")
        elif type(member).forward is nn.Module.forward:
            raise ModelError(
                f"{prefix}{name} is a {type(member).__name__} without a forward, so nothing gathers its parameters. "
                f"Take it out of the ModuleList, and shard the module that uses it with torch's fully_shard."
            )
        elif any(True for _ in member.parameters()):
            yield f"{prefix}{name}"


@contextmanager
def unshard_fsdp2_model(model: nn.Module) -> Iterator[None]:
    """Keep all parameters of a sharded model unsharded within the context, for log-probabilities or generation.

    Within it, parameters are plain tensors, or DTensors along `tp` only, and a forward does not reshard. Collective
    over the ranks that shard the model.
    """
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    with keep_unsharded_after_forward(units):
        for unit in units:
            unit.unshard()
        try:
            yield
        finally:
            for unit in units:
                unit.reshard()


def _destroy_dist_connection() -> None:
    """Destroy the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def _init_weights_after_sharding(model: nn.Module, device_type: str, options: UnitOptions) -> Iterator[None]:
    """Initialize the weights of a model on the meta device after it has been sharded within the context."""
    if not has_meta_tensors(model):
        yield
        return
    sync_rng(device_type)
    deferred = DeferredWeights(model)
    yield
    materialize(model, device_type, parameter_device="cpu" if options.is_offloading else None)
    load_weights(model, deferred)


def _select_meshes(
    mesh: DeviceMesh, dp_name: str | tuple[str, ...], tp_name: str, dp_cp_name: str
) -> tuple[DeviceMesh, DeviceMesh | None]:
    """Return the mesh to shard over, and the axis of tensor parallelism if it has 2 or more ranks."""
    dp_mesh = _find_submesh(mesh, dp_cp_name) or _find_submesh(mesh, dp_name)
    if dp_mesh is None:
        raise MeshError(
            f"the mesh has no axis {dp_name!r}; its axes are {mesh.mesh_dim_names}. "
            f"Give the name of one as dp_mesh_name."
        )
    tp_mesh = _find_submesh(mesh, tp_name)
    if tp_mesh is not None and tp_mesh.size() == 1:
        tp_mesh = None
    # Gradients would not be reduced along other axes, and ranks would diverge silently.
    count = dp_mesh.size() * (tp_mesh.size() if tp_mesh is not None else 1)
    if count != mesh.size():
        sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
        names = [name for each in (dp_mesh, tp_mesh) if each is not None for name in each.mesh_dim_names or ()]
        raise MeshError(
            f"the mesh {sizes} has {mesh.size()} ranks, but the axes that are named, {', '.join(names)}, have {count}. "
            f"Name the others, too: a pair (replicate, shard) as dp_mesh_name, a flattened view of data and context "
            f"axes as dp_cp_mesh_name, or an axis as tp_mesh_name. Or give the part of the mesh to train on."
        )
    return dp_mesh, tp_mesh


def _find_submesh(mesh: DeviceMesh, name: str | tuple[str, ...]) -> DeviceMesh | None:
    try:
        return mesh if mesh.mesh_dim_names == (name,) else mesh[name]
    except (KeyError, RuntimeError):
        return None

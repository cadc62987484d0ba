"""Megatron-FSDP for loops of one's own, on a plain DeviceMesh; the names are those of the reference."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from meshwright.errors import MeshError, StrategyError
from meshwright.mesh import Mesh, open_world
from meshwright.sizes import MeshSizes
from meshwright.validation import validated

from ._compat import hold_cpu_torch
from .config import MegatronFSDPConfig
from .manager import MegatronFSDPManager

_OLD_NAMES = {
    "nvfsdp_unit_modules": "megatron_fsdp_unit_modules",
    "tp_shard_plan": "tp_plan",
    "init_nvfsdp_with_meta_device": "init_fsdp_with_meta_device",
    "keep_fp8_transpose_cache_when_using_custom_fsdp": "keep_fp8_transpose_cache",
}


def megatron_fsdp_strategy_parallelize(
    model: nn.Module,
    device_mesh: DeviceMesh,
    optimizer: Optimizer | None = None,
    *,
    dp_mesh_name: str = "data_parallel",
    tp_mesh_name: str = "tensor_parallel",
    **options: Any,
) -> tuple[nn.Module, Optimizer | None]:
    """Shard a model, and let its optimizer train the shards.

    Gradients are summed, so divide each rank's loss by the tokens of the global batch. `optimizer.step()` waits for the
    reduction and drops the gradients; run all microbatches of a step but the last in the model's `no_sync()`.

    Args:
        model: with equal weights on all ranks, or those of the first are taken.
        device_mesh: of all ranks in order. Its axis `dp_mesh_name` is sharded over; the innermost one may be
            `tp_mesh_name`, for tensor parallelism; others have one rank.
        optimizer: made from the model's parameters, and not stepped yet. It keeps its groups and settings.
        options: fields of MegatronFSDPConfig.

    Returns:
        The module to call, and the same optimizer.

    Raises:
        ConfigError, StrategyError, ModelError: an option cannot act; as for MegatronFSDPManager.
        MeshError: another axis has more than one rank, or there is no axis `dp_mesh_name`.
    """
    config = validated(MegatronFSDPConfig, options, where="options of 'megatron_fsdp'")
    world = open_world(device_mesh.device_type)
    tp_size = _check_mesh(device_mesh, dp_mesh_name, tp_mesh_name)
    manager = MegatronFSDPManager(config, Mesh(MeshSizes(tp_size=tp_size).resolve(world.size), world))
    names = {parameter: name for name, parameter in model.named_parameters()}
    if optimizer is not None:
        _check_optimizer(optimizer, names)
    module = manager.parallelize(model)
    if device_mesh.device_type == "cpu":
        # The caller has no manager to keep.
        hold_cpu_torch(module)
    if optimizer is None:
        return module, None
    given = optimizer
    return module, manager.build_optimizer(lambda named: _moved(given, names, named))


def nvfsdp_strategy_parallelize(
    model: nn.Module, device_mesh: DeviceMesh, optimizer: Optimizer | None = None, **options: Any
) -> tuple[nn.Module, Optimizer | None]:
    """`megatron_fsdp_strategy_parallelize` with the older names of its options, such as nvfsdp_unit_modules."""
    renamed = {_OLD_NAMES.get(name, name): value for name, value in options.items()}
    return megatron_fsdp_strategy_parallelize(model, device_mesh, optimizer, **renamed)


def _check_mesh(mesh: DeviceMesh, dp_mesh_name: str, tp_mesh_name: str) -> int:
    """The ranks of tensor parallelism."""
    names = mesh.mesh_dim_names or ()
    sizes = dict(zip(names, mesh.shape, strict=True))
    dp_size, tp_size = sizes.get(dp_mesh_name, 0), sizes.get(tp_mesh_name, 1)
    shape = [dp_size, tp_size] if dp_mesh_name != tp_mesh_name else []
    ordered = mesh.mesh.flatten().tolist() == list(range(dist.get_world_size()))
    if [size for size in mesh.shape if size > 1] != [size for size in shape if size > 1] or not ordered or not dp_size:
        raise MeshError(
            f"the axes {dp_mesh_name!r} and, within it, {tp_mesh_name!r} must have all {dist.get_world_size()} ranks "
            f"in order, but the axes are {sizes}. Give their names as dp_mesh_name and tp_mesh_name, or use "
            f"MegatronFSDPManager, which takes a meshwright.Mesh."
        )
    return tp_size


def _check_optimizer(optimizer: Optimizer, names: dict[nn.Parameter, str]) -> None:
    if optimizer.state:
        raise StrategyError("the optimizer has been stepped before sharding. Give it anew, or after sharding.")
    if any(parameter not in names for group in optimizer.param_groups for parameter in group["params"]):
        raise StrategyError("the optimizer has parameters that are not the model's. Make it from model.parameters().")


def _moved(
    optimizer: Optimizer, names: dict[nn.Parameter, str], named: Iterable[tuple[str, nn.Parameter]]
) -> Optimizer:
    sharded = dict(named)
    for group in optimizer.param_groups:
        found = (sharded.get(names[parameter]) for parameter in group["params"])
        group["params"] = [parameter for parameter in found if parameter is not None]
    return optimizer

"""The reference's functions for hand-written training loops on a DeviceMesh; they build a `MegatronFSDPManager`."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from meshwright.plugin import ConfigError, Mesh, MeshError, MeshSizes, StrategyError, open_world, validate_config, warn

from ._compat.cpu_torch import use_cpu_torch
from .config import MegatronFSDPConfig
from .manager import MegatronFSDPManager

# Older names of MegatronFSDPConfig fields.
_RENAMED_OPTIONS = {
    "nvfsdp_unit_modules": "megatron_fsdp_unit_modules",
    "tp_shard_plan": "tp_plan",
    "init_nvfsdp_with_meta_device": "init_fsdp_with_meta_device",
    "keep_fp8_transpose_cache_when_using_custom_fsdp": "keep_fp8_transpose_cache",
}
_UNITS_OPTION = "megatron_fsdp_unit_modules"
# The reference's names of strategies that shard parameters. Gradients and optimizer state are sharded like them.
_STRATEGY_ALIASES = ("params", "grads_params")


def megatron_fsdp_strategy_parallelize(
    model: nn.Module,
    device_mesh: DeviceMesh,
    optimizer: Optimizer | None = None,
    *arguments: Any,
    **options: Any,
) -> tuple[nn.Module, Optimizer | None]:
    """Shard a model, and make its optimizer train the shards.

    Gradients are summed, so divide each rank's loss by the token count of the global batch. `optimizer.step()` waits
    for the reduction and drops the gradients. Run all microbatches of a step except the last within the model's
    `no_sync()`.

    Args:
        model: the model; if weights differ between ranks, those of rank 0 are used.
        device_mesh: a mesh of all ranks in order. Parameters are sharded over its axes `dp_mesh_name` and, within it,
            `cp_mesh_name`. The innermost axis may be `tp_mesh_name`, for tensor parallelism. Other axes have one rank.
        optimizer: built from the model's parameters, and not stepped yet. It keeps its groups and settings.
        arguments: options in the order of `nvfsdp_strategy_parallelize`.
        options: fields of MegatronFSDPConfig, also under their older names, and the names of the axes, with the
            defaults of `nvfsdp_strategy_parallelize`. As in the reference's functions, the full model is one unit
            unless `megatron_fsdp_unit_modules` names others. `data_parallel_sharding_strategy` may also be "params" or
            "grads_params", both of which act as "optim_grads_params". Gradients are summed over `cp_mesh_name` as over
            data; sharding sequences over it is up to the caller.

    Returns:
        The module to call, and the same optimizer.

    Raises:
        ConfigError, StrategyError, ModelError: an option has no effect, and see MegatronFSDPManager.
        MeshError: another axis has more than one rank, or there is no axis `dp_mesh_name`.
    """
    options = _bind_positional(arguments) | options
    axes = [options.pop(name, default) for name, default in _AXIS_OPTIONS.items()]
    renamed = {_RENAMED_OPTIONS.get(name, name): value for name, value in options.items()}
    if renamed.get(_UNITS_OPTION) is None:
        renamed[_UNITS_OPTION] = [f"{type(model).__module__}.{type(model).__qualname__}"]
    renamed |= _resolve_strategy_alias(renamed.get("data_parallel_sharding_strategy"))
    config = validate_config(MegatronFSDPConfig, renamed, where="options of 'megatron_fsdp'")
    world = open_world(device_mesh.device_type)
    tp_size = _find_tp_size(device_mesh, *axes)
    manager = MegatronFSDPManager(config, Mesh(MeshSizes(tp_size=tp_size).resolve(world.size), world))
    names = {parameter: name for name, parameter in model.named_parameters()}
    if optimizer is not None:
        _check_optimizer(optimizer, names)
    module = manager.parallelize(model)
    if device_mesh.device_type == "cpu":
        # The caller does not hold a manager.
        use_cpu_torch(module)
    if optimizer is None:
        return module, None
    user_optimizer = optimizer
    return module, manager.build_optimizer(lambda named: _rebind_parameters(user_optimizer, names, named))


def nvfsdp_strategy_parallelize(
    model: nn.Module,
    device_mesh: DeviceMesh,
    optimizer: Optimizer | None = None,
    nvfsdp_unit_modules: list[str] | None = None,
    tp_shard_plan: dict[str, Any] | str | None = None,
    data_parallel_sharding_strategy: str = "optim_grads_params",
    init_nvfsdp_with_meta_device: bool = False,
    grad_reduce_in_fp32: bool = False,
    preserve_fp32_weights: bool = False,
    overlap_grad_reduce: bool = True,
    overlap_param_gather: bool = True,
    check_for_nan_in_grad: bool = True,
    average_in_collective: bool = False,
    disable_bucketing: bool = False,
    calculate_per_token_loss: bool = False,
    keep_fp8_transpose_cache_when_using_custom_fsdp: bool = False,
    nccl_ub: bool = False,
    fsdp_double_buffer: bool = False,
    dp_mesh_name: str = "data_parallel",
    cp_mesh_name: str = "context_parallel",
    tp_mesh_name: str = "tensor_parallel",
    **options: Any,
) -> tuple[nn.Module, Optimizer | None]:
    """Call `megatron_fsdp_strategy_parallelize`, under its older name and with arguments in the reference's order."""
    arguments = locals()
    return megatron_fsdp_strategy_parallelize(**arguments.pop("options"), **arguments)


_PARAMETERS = inspect.signature(nvfsdp_strategy_parallelize).parameters
_POSITIONAL_OPTIONS = [name for name, each in _PARAMETERS.items() if each.kind is each.POSITIONAL_OR_KEYWORD][3:]
_AXIS_OPTIONS = {name: _PARAMETERS[name].default for name in ("dp_mesh_name", "cp_mesh_name", "tp_mesh_name")}


def _bind_positional(arguments: Sequence[Any]) -> dict[str, Any]:
    if len(arguments) > len(_POSITIONAL_OPTIONS):
        raise ConfigError(
            f"{len(arguments)} options by position, but there are {len(_POSITIONAL_OPTIONS)}: "
            f"{', '.join(_POSITIONAL_OPTIONS)}."
        )
    return dict(zip(_POSITIONAL_OPTIONS, arguments, strict=False))


def _resolve_strategy_alias(strategy: Any) -> dict[str, str]:
    if strategy not in _STRATEGY_ALIASES:
        return {}
    if dist.get_rank() == 0:
        warn(
            f"data_parallel_sharding_strategy={strategy!r} shards the optimizer state, too, which lies where the "
            f"parameters are: it acts as 'optim_grads_params'.",
            stacklevel=3,
        )
    return {"data_parallel_sharding_strategy": "optim_grads_params"}


def _find_tp_size(mesh: DeviceMesh, dp_mesh_name: str, cp_mesh_name: str, tp_mesh_name: str) -> int:
    """Return the number of tensor-parallel ranks."""
    names = mesh.mesh_dim_names or ()
    sizes = dict(zip(names, mesh.shape, strict=True))
    axis_names = (dp_mesh_name, cp_mesh_name, tp_mesh_name)
    shape = [sizes.get(name, 1) for name in axis_names] if len(set(axis_names)) == 3 else []
    is_ordered = mesh.mesh.flatten().tolist() == list(range(dist.get_world_size()))
    covers_mesh = [size for size in mesh.shape if size > 1] == [size for size in shape if size > 1]
    if not covers_mesh or not is_ordered or dp_mesh_name not in sizes:
        raise MeshError(
            f"the axes {dp_mesh_name!r} and, within it, {cp_mesh_name!r} and {tp_mesh_name!r} must have all "
            f"{dist.get_world_size()} ranks in order, but the axes are {sizes}. Give their names as dp_mesh_name, "
            f"cp_mesh_name and tp_mesh_name."
        )
    return shape[2]


def _check_optimizer(optimizer: Optimizer, names: dict[nn.Parameter, str]) -> None:
    if optimizer.state:
        raise StrategyError("the optimizer has been stepped before sharding. Give it again, or after sharding.")
    if any(parameter not in names for group in optimizer.param_groups for parameter in group["params"]):
        raise StrategyError("the optimizer has parameters that are not the model's. Make it from model.parameters().")


def _rebind_parameters(
    optimizer: Optimizer, names: dict[nn.Parameter, str], named: Iterable[tuple[str, nn.Parameter]]
) -> Optimizer:
    sharded = dict(named)
    for group in optimizer.param_groups:
        shards = (sharded.get(names[parameter]) for parameter in group["params"])
        group["params"] = [parameter for parameter in shards if parameter is not None]
    return optimizer

"""Checks of models, options and the order of calls, and equal initial weights on all ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from pydantic import BaseModel
from torch import nn
from torch.optim import Optimizer

from ..base.errors import ModelError, StrategyError
from ..base.validation import FLOAT16_REFUSAL
from ..files.terminal import warn
from ..mesh.mesh import Mesh
from ..model.layout import check_not_empty
from ..model.weights import Weights, build_deferred_weights, has_meta_tensors

T = TypeVar("T")
_OWNED_MODULES: WeakSet[nn.Module] = WeakSet()
"""Modules with parameters or buffers that a manager owns."""

# -- the order of calls


def check_not_owned(model: nn.Module, *, has_model: bool) -> None:
    """Raise StrategyError for a second model of a manager, and ModelError for a model that another manager owns."""
    if has_model:
        raise StrategyError("parallelize was called twice on one manager. Build another manager for another model.")
    if any(each in _OWNED_MODULES for each in model.modules()):
        raise ModelError(
            f"{type(model).__name__} has been parallelized by another manager already, and is that one's. Build the "
            f"model again, or read it from what the other one has saved."
        )


def mark_owned(modules: Iterable[nn.Module]) -> None:
    """Mark modules as owned by a manager, except those without tensors, which models of one class may share."""
    _OWNED_MODULES.update(each for each in modules if any(True for _ in (*each.parameters(), *each.buffers())))


def require_model(model: T | None) -> T:
    """Return the model; raise StrategyError before `parallelize`."""
    if model is None:
        raise StrategyError("the manager has no model yet: call manager.parallelize(model) first.")
    return model


def require_optimizer(optimizer: Optimizer | None) -> Optimizer:
    """Return the optimizer; raise StrategyError before `build_optimizer`."""
    if optimizer is None:
        raise StrategyError("the manager has no optimizer yet: call manager.build_optimizer(factory) first.")
    return optimizer


def check_no_pending_gradients(trainable: Iterable[nn.Parameter]) -> None:
    """Raise StrategyError for gradients of an earlier call, which would be reduced a second time."""
    if any(parameter.grad is not None for parameter in trainable):
        raise StrategyError(
            "forward_backward was called while gradients of the last call are pending. Give all microbatches of a "
            "step in one call, and call optimizer_step (or set the gradients to None) before the next."
        )


# -- models and options


def has_router_loss(model: nn.Module) -> bool:
    """Return whether the model's config requests the auxiliary router loss."""
    return bool(getattr(getattr(model, "config", None), "output_router_logits", False))


def check_trainable(model: nn.Module, *, may_be_frozen: bool = False, supports_router_loss: bool = False) -> None:
    """Raise ModelError for a model that cannot be trained correctly. Tie adapters that peft ties by sharing memory."""
    if "peft" in sys.modules:
        from .._compat.peft import tie_adapters

        tie_adapters(model)
    if not may_be_frozen and not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError("no parameter of the model requires a gradient. Unfreeze what is to be trained.")
    check_not_empty(model)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype is torch.float16:
            raise ModelError(
                f"{name} is to be trained in float16: {FLOAT16_REFUSAL}. Load the model in bfloat16 or float32."
            )
    if has_router_loss(model) and not supports_router_loss:
        raise ModelError(
            "config.output_router_logits=True asks for a router loss in addition to the token loss. Training loops of "
            "users and pipelines of given stages (patch_inner_model=false) do not add it. Set it to False to train on "
            "the token loss alone."
        )


def check_reduce_dtype(model: nn.Module, reduce_dtype: str | None) -> None:
    """Raise ModelError, the same on all ranks, for a `reduce_dtype` coarser than a gradient."""
    if reduce_dtype is None:
        return
    dtype = getattr(torch, reduce_dtype)
    for name, parameter in model.named_parameters():
        if torch.promote_types(dtype, parameter.dtype) != dtype:
            raise ModelError(
                f"reduce_dtype={reduce_dtype} is coarser than the gradients of {name} ({parameter.dtype}). "
                f"Leave reduce_dtype out, or use a wider one."
            )


def warn_unused_options(
    config: BaseModel, mesh: Mesh, *, by_axis: Mapping[str, Sequence[str]], unsupported: Mapping[str, str] | None = None
) -> None:
    """Warn on rank 0 about options that have no effect.

    Args:
        by_axis: names of options that have no effect if the size of this axis is 1.
        unsupported: names of options that have no effect here, with the reason.
    """
    if dist.get_rank() != 0:
        return
    fields = type(config).model_fields

    def is_set(name: str) -> bool:
        return name in fields and getattr(config, name) != fields[name].default

    for name, reason in (unsupported or {}).items():
        if is_set(name):
            warn(f"{name}={getattr(config, name)} has no effect here: {reason}.", stacklevel=2)
    for axis, options in by_axis.items():
        unused = [f"{name}={getattr(config, name)}" for name in options if is_set(name)]
        if unused and getattr(mesh.degrees, axis) == 1:
            verb = "has" if len(unused) == 1 else "have"
            warn(f"{' and '.join(unused)} {verb} no effect here: {axis}_size is 1.", stacklevel=2)


# -- equal weights


def sync_initial_weights(model: nn.Module, weights: Weights | None, mesh: Mesh) -> Weights | None:
    """Return the initial weights of an unsharded model. Collective.

    None: the model keeps its own weights, which are made equal on all ranks.
    """
    if weights is None and has_meta_tensors(model):
        weights = build_deferred_weights(model, mesh)
    if weights is None:
        _copy_from_first_rank(model, mesh)
    return weights


def _copy_from_first_rank(model: nn.Module, mesh: Mesh) -> None:
    """Broadcast parameters and buffers from the lowest rank that trains the same part of the model."""
    for axis in ("pp", "dp", "cp", "tp"):
        if getattr(mesh.degrees, axis) == 1:
            continue
        group = mesh.group(axis)
        for tensor in (*model.parameters(), *model.buffers()):
            staged = tensor.detach().to(mesh.device).contiguous()
            dist.broadcast(staged, group=group, group_src=0)
            tensor.data.copy_(staged)
    sync_tp_rng(mesh)


def fork_rng(device: torch.device) -> AbstractContextManager[None]:
    """Restore the random state of the CPU, and of `device` if it is an accelerator, on exit of the context."""
    devices = [] if device.type == "cpu" else [torch.accelerator.current_device_index()]
    return torch.random.fork_rng(devices, device_type=device.type if devices else "cuda")


def sync_tp_rng(mesh: Mesh) -> None:
    """Give ranks along `tp` the same random state, so that dropout masks are equal."""
    if mesh.degrees.tp == 1:
        return
    seed = torch.randint(2**62, (1,)).to(mesh.device)
    dist.broadcast(seed, group=mesh.group("tp"), group_src=0)
    torch.manual_seed(int(seed))

"""What comes before sharding: models that cannot be trained are refused, and all ranks start from the same values."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from .._compat.peft_tying import tie_adapters
from ..base.errors import ModelError
from ..base.validation import NO_FLOAT16
from ..mesh.mesh import Mesh
from ..model.size import check_elements
from ..model.weights import Weights, deferred_weights, is_meta


def equal_weights(model: nn.Module, weights: Weights | None, mesh: Mesh) -> Weights | None:
    """Where the values of a model come from, the same for all ranks. Collective.

    Args:
        model: before sharding.
        weights: that were given.

    Returns:
        The given ones; those that the class of a model on the meta device draws; or None, where the model has values
        and all ranks now have those of the first one.

    Raises:
        ModelError: a model on the meta device cannot be built again; on all ranks.
    """
    if weights is None and is_meta(model):
        weights = deferred_weights(model, mesh)
    if weights is None:
        copy_from_first_rank(model, mesh)
    return weights


def asks_for_router_loss(model: nn.Module) -> bool:
    """Whether the model's configuration asks for a router loss beside the token loss."""
    return bool(getattr(getattr(model, "config", None), "output_router_logits", False))


def check_trainable(model: nn.Module, *, may_be_frozen: bool = False, router_loss: bool = False) -> None:
    """Refuse what would train wrongly or not at all; hold adapters as one parameter that peft ties by memory.

    Args:
        router_loss: the caller adds the router loss where the configuration asks for one.

    Raises:
        ModelError: on all ranks alike, since all hold the same model.
    """
    tie_adapters(model)
    if not may_be_frozen and not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError("no parameter of the model requires a gradient. Unfreeze what is to be trained.")
    check_elements(model)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype is torch.float16:
            raise ModelError(
                f"{name} is to be trained in float16: {NO_FLOAT16}. Load the model in bfloat16 or float32."
            )
    if asks_for_router_loss(model) and not router_loss:
        raise ModelError(
            "config.output_router_logits=True asks for a router loss beside the token loss, which loops by hand, and "
            "pipelines whose stages are given (patch_inner_model=false), do not add. Set it to False to train on the "
            "token loss alone."
        )


def check_reduce_dtype(model: nn.Module, reduce_dtype: str | None) -> None:
    """Refuse sums that are coarser than what is summed.

    Raises:
        ModelError: on all ranks alike.
    """
    if reduce_dtype is None:
        return
    dtype = getattr(torch, reduce_dtype)
    for name, parameter in model.named_parameters():
        if torch.promote_types(dtype, parameter.dtype) != dtype:
            raise ModelError(
                f"reduce_dtype={reduce_dtype} is coarser than the gradients of {name} ({parameter.dtype}). "
                f"Leave reduce_dtype out, or use a wider one."
            )


def copy_from_first_rank(model: nn.Module, mesh: Mesh) -> None:
    """Give every rank that trains the same part of the model the parameters and buffers of the first one.

    Copies from different seeds or files would else train as a chimera, without any error. Ranks along `tp` also get
    the random state of the first, since dropout must fall on the same elements of what they all hold.
    """
    for axis in ("pp", "dp", "cp", "tp"):
        if getattr(mesh.degrees, axis) == 1:
            continue
        group = mesh.group(axis)
        for tensor in (*model.parameters(), *model.buffers()):
            staged = tensor.detach().to(mesh.device).contiguous()
            dist.broadcast(staged, group=group, group_src=0)
            tensor.data.copy_(staged)
    share_random_state(mesh)


def share_random_state(mesh: Mesh) -> None:
    if mesh.degrees.tp == 1:
        return
    seed = torch.randint(2**62, (1,)).to(mesh.device)
    dist.broadcast(seed, group=mesh.group("tp"), group_src=0)
    torch.manual_seed(int(seed))

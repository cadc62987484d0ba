"""Give a model on the meta device memory for what this rank holds, and its values.

A model may be built without memory, be sharded, and only then get values, each rank those of its own shards. They come
from a `Weights`: the files of a pretrained model, or `drawn_weights.DeferredWeights`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..mesh.mesh import Mesh
from ..tensors.chunks import LocalChunk, get_local_chunks
from .deferred_init import DeferredWeights


class Weights(Protocol):
    """Values of a model, by the names of the unwrapped Hugging Face model. A tied parameter is known by each name."""

    def __contains__(self, name: object) -> bool:
        """Return whether there are values for this parameter or buffer; each of the model's parameters has some."""

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Return the values of a rectangle at `offsets`, of shape `sizes`, on the CPU; without communication."""


def has_meta_tensors(model: nn.Module) -> bool:
    """Return whether a model has parameters or buffers on the meta device."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def move_to_meta(model: nn.Module) -> None:
    """Replace all parameters by plain ones on the meta device, tied as they are."""
    replace_parameters(
        model, lambda p: nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta"), requires_grad=p.requires_grad)
    )


def replace_parameters(model: nn.Module, make: Callable[[nn.Parameter], nn.Parameter]) -> None:
    """Replace each parameter by what is made of it, in place. What is tied is made once, and stays tied."""
    others: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter not in others:
                others[parameter] = make(parameter)
            setattr(module, name, others[parameter])


def build_deferred_weights(model: nn.Module, mesh: Mesh) -> DeferredWeights:
    """Return the values that the class of a model on the meta device draws, equal on all ranks. Collective."""
    sync_rng(mesh.device)
    return mesh.world.run_on_all_ranks(lambda: DeferredWeights(model))


def sync_rng(device: torch.device | str) -> None:
    """Set the CPU's random generator of every rank to the state of the first one's. Collective."""
    state = torch.get_rng_state().to(device)
    dist.broadcast(state, src=0)
    torch.set_rng_state(state.cpu())


def materialize(
    model: nn.Module, device: torch.device | str, *, parameter_device: torch.device | str | None = None
) -> None:
    """Give the tensors of a model that are on the meta device memory, with no values yet; before or after sharding.

    Its parameters are all on the meta device, or none is; they go to `parameter_device`, if that is not where the model
    runs. Tied parameters stay tied. Buffers that have values keep them.
    """
    first: dict[nn.Parameter, str] = {}
    tied = {name: first.setdefault(each, name) for name, each in model.named_parameters(remove_duplicate=False)}
    buffers = dict(model.named_buffers())
    if any(parameter.is_meta for parameter in model.parameters()):
        model.to_empty(device=parameter_device or device)
    for name, other in tied.items():
        # `to_empty` has made one for each name.
        if name != other:
            set_tensor(model, name, model.get_parameter(other))
    for name, buffer in buffers.items():
        set_tensor(model, name, torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device))


@torch.no_grad()
def load_weights(
    model: nn.Module, weights: Weights, get_chunks: Callable[[Tensor, Tensor], list[LocalChunk]] | None = None
) -> None:
    """Read what this rank holds of parameters and buffers; `get_chunks` is `Parts.pieces`, None for (D)Tensors."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in weights:
            for piece in get_local_chunks(tensor) if get_chunks is None else get_chunks(tensor, tensor):
                piece.tensor.copy_(weights.read(name, piece.offsets, piece.sizes))


def set_tensor(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Set the parameter or buffer of a dotted name."""
    module, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(module), leaf, tensor)

"""Materialize a model on the meta device and load its values.

A model may be built without memory, be sharded, and only then get values, each rank those of its own shards. The values
come from a `Weights`: the files of a pretrained model, or `deferred_init.DeferredWeights`.
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
    """Values of a model by name in the unwrapped Hugging Face model. A tied parameter has all of its names."""

    def __contains__(self, name: object) -> bool:
        """Return whether this parameter or buffer has values; every parameter of the model does."""

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Return the rectangle of shape `sizes` at `offsets`, on the CPU; without communication."""


def has_meta_tensors(model: nn.Module) -> bool:
    """Return whether a model has parameters or buffers on the meta device."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def move_to_meta(model: nn.Module) -> None:
    """Replace all parameters by plain ones on the meta device; tied parameters stay tied."""
    replace_parameters(
        model, lambda p: nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta"), requires_grad=p.requires_grad)
    )


def replace_parameters(model: nn.Module, make: Callable[[nn.Parameter], nn.Parameter]) -> None:
    """Replace each parameter in place by the result of `make`, called once for tied parameters, which stay tied."""
    replacements: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter not in replacements:
                replacements[parameter] = make(parameter)
            setattr(module, name, replacements[parameter])


def build_deferred_weights(model: nn.Module, mesh: Mesh) -> DeferredWeights:
    """Return the initial values of a model on the meta device, equal on all ranks. Collective."""
    sync_rng(mesh.device)
    return mesh.world.run_on_all_ranks(lambda: DeferredWeights(model))


def sync_rng(device: torch.device | str) -> None:
    """Set the CPU's random generator of every rank to the state of rank 0. Collective."""
    state = torch.get_rng_state().to(device)
    dist.broadcast(state, src=0)
    torch.set_rng_state(state.cpu())


def materialize(
    model: nn.Module, device: torch.device | str, *, parameter_device: torch.device | str | None = None
) -> None:
    """Allocate uninitialized memory for the tensors of a model that are on the meta device, before or after sharding.

    Either all parameters are on the meta device or none is. They go to `parameter_device`, or to `device`, where the
    model runs. Tied parameters stay tied. Buffers with values keep them.
    """
    first_names: dict[nn.Parameter, str] = {}
    names = {name: first_names.setdefault(each, name) for name, each in model.named_parameters(remove_duplicate=False)}
    buffers = dict(model.named_buffers())
    if any(parameter.is_meta for parameter in model.parameters()):
        model.to_empty(device=parameter_device or device)
    for name, other in names.items():
        # `to_empty` creates a parameter for each name.
        if name != other:
            set_tensor(model, name, model.get_parameter(other))
    for name, buffer in buffers.items():
        set_tensor(model, name, torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device))


@torch.no_grad()
def load_weights(
    model: nn.Module, weights: Weights, get_chunks: Callable[[Tensor, Tensor], list[LocalChunk]] | None = None
) -> None:
    """Load this rank's chunks of parameters and buffers.

    `get_chunks` is `ShardLayout.get_local_chunks`; None for plain tensors and DTensors.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in weights:
            for chunk in get_local_chunks(tensor) if get_chunks is None else get_chunks(tensor, tensor):
                chunk.tensor.copy_(weights.read(name, chunk.offsets, chunk.sizes))


def set_tensor(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Set the parameter or buffer of a dotted name."""
    module, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(module), leaf, tensor)

"""Give a model on the meta device memory for what this rank holds, and its values.

[Note: weights] A model may be built without memory, be sharded, and only then get values, each rank those of its own
pieces. They come from a `Weights`: the files of a pretrained model, or `drawn_weights.DeferredModel`, which has the
values that the model's class would have drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..mesh.mesh import Mesh
from ..tensors.pieces import Piece, tensor_pieces
from .drawn_weights import DeferredModel


class Weights(Protocol):
    """Where a model gets its values from, by the names of the unwrapped Hugging Face model.

    A parameter with several names is known by each of them.
    """

    def __contains__(self, name: object) -> bool:
        """Whether there are values for this parameter or buffer; each of the model's parameters has some."""

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """The values of a rectangle of a parameter or buffer, on the CPU; without communication.

        Args:
            offsets: where it begins, along each dim.
            sizes: its shape.
        """


def is_meta(model: nn.Module) -> bool:
    """Whether a parameter or buffer is on the meta device, and so has no values yet."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def leave_on_meta(model: nn.Module) -> None:
    """Plain parameters without values in place of all, tied as they are."""

    def plain(parameter: nn.Parameter) -> nn.Parameter:
        values = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        return nn.Parameter(values, requires_grad=parameter.requires_grad)

    replace_parameters(model, plain)


def replace_parameters(model: nn.Module, made: Callable[[nn.Parameter], nn.Parameter]) -> None:
    """Put what is made of each parameter in its place; in place. What is tied is made once, and stays tied."""
    others: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter not in others:
                others[parameter] = made(parameter)
            setattr(module, name, others[parameter])


def deferred_weights(model: nn.Module, mesh: Mesh) -> DeferredModel:
    """The values that the class of a model on the meta device draws, equal on all ranks. Collective.

    Raises:
        ModelError: the model cannot be built again; on all ranks.
    """
    same_generator(mesh.device)
    return mesh.world.together(lambda: DeferredModel(model))


def same_generator(device: torch.device | str) -> None:
    """Set the CPU's random generator of every rank to the state of the first one's. Collective."""
    state = torch.get_rng_state().to(device)
    dist.broadcast(state, src=0)
    torch.set_rng_state(state.cpu())


def materialize(
    model: nn.Module, device: torch.device | str, *, parameters_on: torch.device | str | None = None
) -> None:
    """Give the tensors of a model that are on the meta device memory, with no values in it yet.

    Tied parameters stay tied. Buffers that have values keep them.

    Args:
        model: before or after sharding; its parameters are all on the meta device, or none is.
        device: where the model runs.
        parameters_on: where its parameters lie, if not there.
    """
    tied: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        tied.setdefault(id(parameter), []).append(name)
    buffers = dict(model.named_buffers())
    if any(parameter.is_meta for parameter in model.parameters()):
        model.to_empty(device=parameters_on or device)
    for names in tied.values():
        for name in names[1:]:
            # `to_empty` has made one for each name.
            set_tensor(model, name, model.get_parameter(names[0]))
    for name, buffer in buffers.items():
        set_tensor(model, name, torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device))


@torch.no_grad()
def fill(model: nn.Module, weights: Weights, pieces: Callable[[Tensor, Tensor], list[Piece]] | None = None) -> None:
    """Read what this rank holds of every parameter and buffer for which there are values. No communication.

    Args:
        model: with memory; before or after sharding.
        weights: by the names of the model.
        pieces: `Parts.pieces` of the strategy; None: tensors are plain, or DTensors.
    """
    for name, tensor in _tensors(model):
        if name not in weights:
            continue
        for piece in tensor_pieces(tensor) if pieces is None else pieces(tensor, tensor):
            piece.tensor.copy_(weights.read(name, piece.offsets, piece.sizes))


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Each parameter and buffer once."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def set_tensor(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Put another parameter or buffer in the place of one."""
    module, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(module), leaf, tensor)

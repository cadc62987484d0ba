"""Let a model on the meta device run, in next to no memory, before any rank holds a part of it. Nothing here trains.

A study of a model asks what depends on what, for which nearly all values will do. Each parameter gets a short
row of random numbers, seen as if it were whole: element (i, j, ...) is number i + j + ... of the row.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from meshwright.model.weights import Weights, is_meta


@contextmanager
def trial_values(model: nn.Module, weights: Weights | None, device: torch.device) -> Iterator[None]:
    """Give all tensors of a model on the meta device values for a while; do nothing where a model has its own.

    Args:
        model: whole.
        weights: of the model; buffers are read, since a model may compute positions or masks from them.
        device: to run it on.
    """
    if weights is None or not is_meta(model):
        yield
        return
    generator = torch.Generator().manual_seed(0)
    lent: dict[Tensor, Tensor] = {}
    for tensor in model.parameters():
        lent[tensor] = nn.Parameter(_row(tensor, generator, device), tensor.requires_grad)
    for name, tensor in model.named_buffers():
        if not tensor.is_meta:
            lent[tensor] = tensor.to(device)
        elif name in weights:
            lent[tensor] = weights.read(name, [0] * tensor.dim(), tensor.shape).to(device, copy=True)
        else:
            lent[tensor] = torch.zeros_like(tensor, device=device)
    original = {value: tensor for tensor, value in lent.items()}
    try:
        _replace(model, lent)
        yield
    finally:
        _replace(model, original)


def _replace(model: nn.Module, others: dict[Tensor, Tensor]) -> None:
    """Put other tensors in the places of parameters and buffers, tied ones in all of theirs."""
    for module in model.modules():
        own = (
            *module.named_parameters(recurse=False, remove_duplicate=False),
            *module.named_buffers(recurse=False, remove_duplicate=False),
        )
        for name, tensor in own:
            if tensor in others:
                setattr(module, name, others[tensor])


SMALL = 1 << 16
"""Parameters of at most so many elements are whole."""
KERNEL = 16
"""So are those whose last dim is at most this: convolutions read their weights as if they were contiguous, beyond the
end of a row."""


def _row(tensor: Tensor, generator: torch.Generator, device: torch.device) -> Tensor:
    """Values of the shape and dtype of a parameter, of such a size that activations keep theirs."""
    is_small = tensor.numel() <= SMALL or tensor.shape[-1] <= KERNEL
    row = torch.randn(tensor.shape if is_small else (sum(tensor.shape),), generator=generator)
    row = row / tensor.shape[-1] ** 0.5 if tensor.dim() > 1 else 1 + 0.1 * row
    row = row.to(device, tensor.dtype)
    return row if is_small else row.as_strided(tensor.shape, (1,) * tensor.dim())

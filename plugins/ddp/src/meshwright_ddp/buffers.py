"""Flat buffers: the gradients of all parameters of one dtype, and with the distributed optimizer their values.

Parameters become views of their buffer, so that one collective carries a whole bucket and no copy is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from .bucket_ranges import BucketLayout, bucket_layout


@dataclass(frozen=True)
class BucketSizes:
    """How buffers are cut; see `layout.bucket_layout`, whose arguments these are."""

    bucket_size: int | None
    dp_size: int
    distributed_optimizer: bool
    pad_for_high_busbw: bool = False


@dataclass(eq=False)
class Buffer:
    """One dtype's flat tensors, of `layout.numel` elements each.

    Attributes:
        names, parameters: in registration order, as `layout` counts them.
        gradients: in the dtype in which they are reduced; padding stays zero.
        values: the parameters; None without the distributed optimizer.
    """

    names: list[str]
    parameters: list[nn.Parameter]
    layout: BucketLayout
    gradients: Tensor
    values: Tensor | None
    first: list[int] = field(default_factory=list)
    """Registration index in the whole model of each parameter."""

    def gradient(self, index: int) -> Tensor:
        """The gradient of one parameter: a view in its shape."""
        start, end, _ = self.layout.param_ranges[index]
        return self.gradients[start:end].view(self.parameters[index].shape)


def make_buffers(
    parameters: Mapping[str, nn.Parameter], sizes: BucketSizes, gradient_dtype: torch.dtype | None
) -> list[Buffer]:
    """Buffers for parameters in registration order, one for each of their dtypes.

    With the distributed optimizer the parameters move into their buffer, keeping identity and values.

    Args:
        gradient_dtype: in which gradients are reduced; None: the parameters' own.
    """
    groups: dict[torch.dtype, list[tuple[int, str, nn.Parameter]]] = {}
    for index, (name, parameter) in enumerate(parameters.items()):
        groups.setdefault(parameter.dtype, []).append((index, name, parameter))
    buffers = []
    for dtype, members in groups.items():
        order, names, own = (list(column) for column in zip(*members, strict=True))
        layout = bucket_layout(
            [parameter.numel() for parameter in own],
            bucket_size=sizes.bucket_size,
            dp_size=sizes.dp_size,
            distributed_optimizer=sizes.distributed_optimizer,
            # Marked by who ties parameters over pipeline stages.
            shared_embeddings={i for i, parameter in enumerate(own) if getattr(parameter, "shared_embedding", False)},
            pad_for_high_busbw=sizes.pad_for_high_busbw,
        )
        device = own[0].device
        gradients = torch.zeros(layout.numel, dtype=gradient_dtype or dtype, device=device)
        values = _moved(own, layout) if sizes.distributed_optimizer else None
        buffers.append(Buffer(names, own, layout, gradients, values, order))
    return buffers


def _moved(parameters: list[nn.Parameter], layout: BucketLayout) -> Tensor:
    """A flat tensor of the parameters' values, of which the parameters are views from now on."""
    values = torch.zeros(layout.numel, dtype=parameters[0].dtype, device=parameters[0].device)
    for parameter, (start, end, _) in zip(parameters, layout.param_ranges, strict=True):
        view = values[start:end].view(parameter.shape)
        view.copy_(parameter.detach())
        parameter.data = view
    return values

"""Flat buffers: the gradients of all parameters of one dtype, and with the distributed optimizer their values.

Parameters become views of their buffer, so that one collective carries a whole bucket and no copy is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from meshwright.base.errors import ModelError

from .bucket_ranges import BucketLayout, bucket_layout, default_bucket_size
from .config import DistributedDataParallelConfig
from .reduction import Groups


@dataclass(eq=False)
class Buffer:
    """The flat tensors of the parameters of one dtype.

    Attributes:
        names, parameters: in registration order, as `layout` counts them.
        layout: where each lies.
        gradients: (layout.numel,), in the dtype in which they are reduced; padding stays zero.
        values: (layout.numel,), in the parameters' dtype: what they are views of; None without the distributed
            optimizer.
        first: registration index in the whole model of each parameter.
    """

    names: list[str]
    parameters: list[nn.Parameter]
    layout: BucketLayout
    gradients: Tensor
    values: Tensor | None
    first: list[int] = field(default_factory=list)

    def gradient(self, index: int) -> Tensor:
        """The gradient of parameter `index`: a view in its shape and in the dtype of `gradients`."""
        start, end, _ = self.layout.param_ranges[index]
        return self.gradients[start:end].view(self.parameters[index].shape)


def make_buffers(
    parameters: Mapping[str, nn.Parameter],
    config: DistributedDataParallelConfig,
    groups: Groups,
    gradient_dtype: torch.dtype | None = None,
) -> list[Buffer]:
    """Buffers for parameters in registration order, one for each of their dtypes.

    With the distributed optimizer the parameters move into their buffer, keeping identity and values.

    Args:
        parameters: those that train, by name.
        config: how buffers are cut, and in which dtype gradients are reduced.
        groups: the ranks that share each bucket.
        gradient_dtype: in which gradients are reduced instead; None: what the config says, or else the parameters' own.

    Raises:
        ModelError: more buckets than elements; on all ranks alike, before a parameter moves.
    """
    if gradient_dtype is None and config.gradient_dtype is not None:
        gradient_dtype = getattr(torch, config.gradient_dtype)
    size = bucket_size(config, sum(parameter.numel() for parameter in parameters.values()), groups.ranks)
    by_dtype: dict[torch.dtype, list[tuple[int, str, nn.Parameter]]] = {}
    for index, (name, parameter) in enumerate(parameters.items()):
        by_dtype.setdefault(parameter.dtype, []).append((index, name, parameter))
    buffers = []
    for dtype, members in by_dtype.items():
        order, names, own = (list(column) for column in zip(*members, strict=True))
        layout = bucket_layout(
            [parameter.numel() for parameter in own],
            bucket_size=size,
            dp_size=groups.size,
            distributed_optimizer=config.use_distributed_optimizer,
            # Marked by who ties parameters over pipeline stages.
            shared_embeddings={i for i, parameter in enumerate(own) if getattr(parameter, "shared_embedding", False)},
            pad_for_high_busbw=config.pad_buckets_for_high_nccl_busbw,
        )
        device = own[0].device
        gradients = torch.zeros(layout.numel, dtype=gradient_dtype or dtype, device=device)
        values = _moved(own, layout) if config.use_distributed_optimizer else None
        buffers.append(Buffer(names, own, layout, gradients, values, order))
    return buffers


def bucket_size(config: DistributedDataParallelConfig, numel: int, ranks: int) -> int | None:
    """Elements after which a bucket ends; None: it never does.

    Args:
        config: which of its two options says so.
        numel: elements of all parameters that train.
        ranks: over which gradients are summed.

    Raises:
        ModelError: more buckets than elements; on all ranks alike.
    """
    if not config.overlap_grad_reduce:
        return None
    if config.num_buckets is None:
        return config.bucket_size or default_bucket_size(ranks)
    if config.num_buckets > numel:
        raise ModelError(f"num_buckets={config.num_buckets}, but the model trains {numel} elements. Use fewer.")
    return numel // config.num_buckets


def _moved(parameters: list[nn.Parameter], layout: BucketLayout) -> Tensor:
    """A flat tensor of the parameters' values, of which the parameters are views from now on."""
    values = torch.zeros(layout.numel, dtype=parameters[0].dtype, device=parameters[0].device)
    for parameter, (start, end, _) in zip(parameters, layout.param_ranges, strict=True):
        view = values[start:end].view(parameter.shape)
        view.copy_(parameter.detach())
        parameter.data = view
    return values

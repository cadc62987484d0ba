"""The styles that a tensor-parallel plan names: where a module's parameters lie, and what is done around its forward.

Names and meanings are those of transformers' plans (`base_model_tp_plan`); modules compute on plain local tensors.
Source: Shoeybi et al. 2019, arXiv:1909.08053, for column- and row-parallel layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from transformers.pytorch_utils import Conv1D

from ..._compat.peft import TransposedFactor, wrapped
from ..._compat.torch import own_parameters, packed_shard
from ...base.errors import ModelError
from ...step.lm_head import DeferredLogits
from .collectives import Copy, Gather, Reduce, ReduceScatter, ShardedVocabulary, Split, chunk_sizes

Forward: TypeAlias = Callable[..., Any]
LINEAR = ("out_features", "nf")
"""Attributes of linear layers, torch's and the Conv1D of transformers."""
PACKED_PARTS = 2
"""Gate and up projection are concatenated in a packed parameter."""


class Around(Protocol):
    """What a style may use: the axis `tp`, and the model around the module. `TensorParallel` is one."""

    group: dist.ProcessGroup
    size: int
    rank: int
    text_config: Any

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a replicated tensor for use in parts; see `collectives.Copies`."""

    def scatters(self, module: nn.Module, output: Tensor) -> bool:
        """Return whether a row-parallel layer's sum is scattered along the sequence."""


@dataclass(frozen=True)
class Style:
    """One style.

    Attributes:
        place: (module, name, parameter) to the placement of a parameter of the module.
        run: the module's forward with its communication; None if there is none.
        partial: whether each rank's gradients of the parameters are partial, and are summed.
        needs: attributes of which the module must have one.
    """

    place: Callable[[nn.Module, str, Tensor], Placement]
    run: Callable[..., Any] | None = None
    partial: bool = False
    needs: tuple[str, ...] = ()


# -- where parameters lie

_IN_OUT = (Conv1D, TransposedFactor)
"""Layers whose weight has the input features first."""


def _whole(module: nn.Module, name: str, parameter: Tensor) -> Placement:
    return Replicate()


def _columns(module: nn.Module, name: str, parameter: Tensor) -> Placement:
    """Along the output features: (out, in) of a linear layer, (in, out) of `_IN_OUT`, the last dim but one else."""
    if parameter.dim() == 1:
        return Shard(0)
    return Shard(1 if isinstance(module, _IN_OUT) else parameter.dim() - 2)


def _rows(module: nn.Module, name: str, parameter: Tensor) -> Placement:
    """Along the input features; the bias is added once, to the sum."""
    if name == "bias":
        return Replicate()
    return Shard(0 if isinstance(module, _IN_OUT) else parameter.dim() - 1)


def _packed_columns(module: nn.Module, name: str, parameter: Tensor) -> Placement:
    return packed_shard(parameter.dim() - 2 if parameter.dim() > 1 else 0, PACKED_PARTS)


def _packed_rows(module: nn.Module, name: str, parameter: Tensor) -> Placement:
    return Replicate() if parameter.dim() == 1 else packed_shard(parameter.dim() - 1, PACKED_PARTS)


def _along(dim: int) -> Callable[[nn.Module, str, Tensor], Placement]:
    return lambda module, name, parameter: Shard(dim)


# -- what happens around forward


def _column_linear(tp: Around, module: nn.Module, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
    first, args, kwargs = _take_first(args, kwargs)
    layer = wrapped(module)
    if not isinstance(layer, Conv1D):
        return forward(tp.copy(first), *args, **kwargs)
    # Its forward shapes the output by `nf`.
    whole, layer.nf = layer.nf, layer.weight.shape[1]
    try:
        return forward(tp.copy(first), *args, **kwargs)
    finally:
        layer.nf = whole


def _column_linear_gathered(tp: Around, module: nn.Module, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
    output = _column_linear(tp, module, forward, *args, **kwargs)
    if isinstance(output, DeferredLogits):
        return output.divided(ShardedVocabulary.over(tp.group, out_features(module)))
    return Gather.apply(output, -1, out_features(module), tp.group)


def _row_linear(tp: Around, module: nn.Module, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
    own = own_parameters(wrapped(module))
    bias = own.get("bias")
    if bias is None:
        return _summed(tp, module, forward(*args, **kwargs))
    # The bias must be added once, not by every rank.
    own["bias"] = None if isinstance(wrapped(module), nn.Linear) else torch.zeros_like(bias)
    try:
        output = forward(*args, **kwargs)
    finally:
        own["bias"] = bias
    return _summed(tp, module, output) + bias


def _row_linear_split(tp: Around, module: nn.Module, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
    first, args, kwargs = _take_first(args, kwargs)
    return _row_linear(tp, module, forward, Split.apply(first, -1, tp.group), *args, **kwargs)


def _summed(tp: Around, module: nn.Module, output: Tensor) -> Tensor:
    scatters = tp.scatters(module, output)
    result: Tensor = ReduceScatter.apply(output, 1, tp.group) if scatters else Reduce.apply(output, tp.group)
    return result


def _embedding_rows(tp: Around, module: nn.Module, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
    """Look up this rank's entries of the vocabulary; other rows are zero until the sum."""
    ids, args, kwargs = _take_first(args, kwargs)
    layer = wrapped(module)
    sizes = chunk_sizes(layer.num_embeddings, tp.size)
    start, count = sum(sizes[: tp.rank]), sizes[tp.rank]
    here = (ids >= start) & (ids < start + count)
    padding = layer.padding_idx
    # The row without a gradient, by its index on this rank.
    layer.padding_idx = padding - start if isinstance(padding, int) and start <= padding < start + count else None
    try:
        if count:
            rows = forward(torch.where(here, ids - start, 0), *args, **kwargs)
            rows = torch.where(here[..., None], rows, 0.0)
        else:
            weight = own_parameters(layer)["weight"]
            rows = weight.new_zeros(*ids.shape, weight.shape[1]) + weight.sum()
    finally:
        layer.padding_idx = padding
    return Reduce.apply(rows, tp.group)


def _embedding_columns(tp: Around, module: nn.Module, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
    return Gather.apply(forward(*args, **kwargs), -1, wrapped(module).embedding_dim, tp.group)


def _latent_projection(tp: Around, module: nn.Module, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
    """Multi-head latent attention: the rotary part of the output is used by this rank's heads, the rest by a
    column-parallel layer, which sums its gradient itself."""
    output = forward(*args, **kwargs)
    rotary = tp.text_config.qk_rope_head_dim
    latent, rope = output.split([output.shape[-1] - rotary, rotary], dim=-1)
    return torch.cat([latent, Copy.apply(rope, tp.group)], dim=-1)


def _experts(tp: Around, module: nn.Module, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
    """Every rank has a part of every expert: inputs and routing weights are used in parts, outputs are partial."""

    def copied(value: Any) -> Any:
        return tp.copy(value) if isinstance(value, Tensor) and value.is_floating_point() else value

    output = forward(*map(copied, args), **{name: copied(value) for name, value in kwargs.items()})
    return Reduce.apply(output, tp.group)


def _identity_expert(tp: Around, module: nn.Module, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
    """An expert without parameters, replicated among experts whose outputs are summed."""
    first, args, kwargs = _take_first(args, kwargs)
    return forward(first / tp.size, *args, **kwargs)


def _output_summed(tp: Around, module: nn.Module, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
    output = forward(*args, **kwargs)
    return None if output is None else Reduce.apply(output, tp.group)


def _on_sequence_shard(tp: Around, module: nn.Module, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
    """A pointwise module, on a part of the positions."""
    first, args, kwargs = _take_first(args, kwargs)
    output = forward(Split.apply(first, 1, tp.group), *args, **kwargs)
    return Gather.apply(output, 1, first.shape[1], tp.group)


STYLES: Mapping[str, Style] = {
    "colwise": Style(_columns, _column_linear, needs=LINEAR),
    "colwise_gather_output": Style(_columns, _column_linear_gathered, needs=LINEAR),
    "colwise_rep": Style(_columns, _column_linear_gathered, needs=LINEAR),
    "rowwise": Style(_rows, _row_linear, needs=LINEAR),
    "rowwise_split_input": Style(_rows, _row_linear_split, needs=LINEAR),
    "rowwise_rep": Style(_rows, _row_linear_split, needs=LINEAR),
    "embedding_rowwise": Style(_along(0), _embedding_rows, needs=("num_embeddings",)),
    "embedding_colwise": Style(_along(1), _embedding_columns, needs=("embedding_dim",)),
    "packed_colwise": Style(_packed_columns, _column_linear, needs=LINEAR),
    "packed_rowwise": Style(_packed_rows),
    "replicated_with_grad_allreduce": Style(_whole, partial=True),
    "mla_kv_a_proj": Style(_whole, _latent_projection),
    "moe_tp_experts": Style(_whole, _experts),
    "moe_identity_expert": Style(_whole, _identity_expert),
    "all_reduce": Style(_whole, _output_summed),
    "sequence_parallel": Style(_whole, _on_sequence_shard, partial=True),
    "local_params": Style(_whole),
    "replicate": Style(_whole),
}


def out_features(module: nn.Module) -> int:
    """Return the output features of a full linear layer; raises ModelError for other modules."""
    layer = wrapped(module)
    size = getattr(layer, "nf" if isinstance(layer, Conv1D) else "out_features", None)
    if not isinstance(size, int):
        raise ModelError(f"{type(module).__name__} has no out_features: colwise styles shard linear layers.")
    return size


def _take_first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Split off the input of a module of one input, positional or not."""
    if args:
        return args[0], args[1:], kwargs
    name = next(iter(kwargs))
    return kwargs[name], (), {key: value for key, value in kwargs.items() if key != name}

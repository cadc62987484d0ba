"""The styles that a tensor-parallel plan names: where a module's parameters lie, and what is done around its forward.

The names are those of transformers' plans (`base_model_tp_plan`), and so is what they mean; modules compute on plain
local tensors. A style that no plan of ours needs more than a name for shares an implementation with its like.
Source: Shoeybi et al. 2019, arXiv:1909.08053, for column and row parallel layers; transformers' documentation of
tensor parallelism for the names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from transformers.pytorch_utils import Conv1D

from ..._compat.peft import wrapped
from ..._compat.peft_tying import TransposedFactor
from ..._compat.torch import own_parameters, packed_shard
from ...base.errors import ModelError
from ...step.deferred_logits import DeferredLogits
from .collectives import Copy, Gather, Reduce, ReduceScatter, Split, chunk_sizes
from .sharded_vocabulary import ShardedVocabulary

if TYPE_CHECKING:
    from .around import Around

Forward: TypeAlias = Callable[..., Any]
LINEAR = ("out_features", "nf")
"""What linear layers have, torch's and the Conv1D of transformers."""
PACKED_PARTS = 2
"""Gate and up projection lie one behind the other in a packed parameter."""


@dataclass(frozen=True)
class Style:
    """One style.

    Attributes:
        place: `place(module, name, parameter)`: the placement of a parameter of the module.
        run: `run(parallel, module, forward, args, kwargs)`: the module's forward, with what is communicated around it;
            None where nothing is.
        partial: each rank's gradient of the parameters covers a part of the computation, and they are summed.
        needs: one of these attributes is what the module must have.
    """

    place: Callable[[nn.Module, str, Tensor], Placement]
    run: Callable[[Around, nn.Module, Forward, tuple[Any, ...], dict[str, Any]], Any] | None = None
    partial: bool = False
    needs: tuple[str, ...] = ()


# -- where parameters lie

_IN_OUT = (Conv1D, TransposedFactor)
"""Layers whose weight has the input features first."""


def _whole(module: nn.Module, name: str, parameter: Tensor) -> Placement:
    return Replicate()


def _columns(module: nn.Module, name: str, parameter: Tensor) -> Placement:
    """Along the output features: (out, in) of a linear layer, (in, out) of `_IN_OUT`, the first dim but one else."""
    if parameter.dim() == 1:
        return Shard(0)
    return Shard(1 if isinstance(module, _IN_OUT) else parameter.dim() - 2)


def _rows(module: nn.Module, name: str, parameter: Tensor) -> Placement:
    """Along the input features; the bias is added once, to the sum."""
    if name == "bias":
        return Replicate()
    return Shard(0 if isinstance(module, _IN_OUT) else parameter.dim() - 1)


def _packed(dim: int) -> Callable[[nn.Module, str, Tensor], Placement]:
    def place(module: nn.Module, name: str, parameter: Tensor) -> Placement:
        return packed_shard(parameter.dim() + dim if parameter.dim() > 1 else 0, PACKED_PARTS)

    return place


def _packed_rows(module: nn.Module, name: str, parameter: Tensor) -> Placement:
    return Replicate() if parameter.dim() == 1 else _packed(-1)(module, name, parameter)


def _along(dim: int) -> Callable[[nn.Module, str, Tensor], Placement]:
    return lambda module, name, parameter: Shard(dim)


# -- what happens around forward


def _column_linear(
    parallel: Around, module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    first, args, kwargs = _take_first(args, kwargs)
    layer = wrapped(module)
    if not isinstance(layer, Conv1D):
        return forward(parallel.copy(first), *args, **kwargs)
    # Its own forward shapes the output by the number of all features.
    whole, layer.nf = layer.nf, layer.weight.shape[1]
    try:
        return forward(parallel.copy(first), *args, **kwargs)
    finally:
        layer.nf = whole


def _column_linear_gathered(
    parallel: Around, module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    output = _column_linear(parallel, module, forward, args, kwargs)
    if isinstance(output, DeferredLogits):
        return output.divided(ShardedVocabulary.over(parallel.group, out_features(module)))
    return Gather.apply(output, -1, out_features(module), parallel.group)


def _row_linear(
    parallel: Around, module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    own = own_parameters(wrapped(module))
    bias = own.get("bias")
    if bias is None:
        return _summed(parallel, module, forward(*args, **kwargs))
    # The bias must be added once, not by every rank.
    own["bias"] = None if isinstance(wrapped(module), nn.Linear) else torch.zeros_like(bias)
    try:
        output = forward(*args, **kwargs)
    finally:
        own["bias"] = bias
    return _summed(parallel, module, output) + bias


def _row_linear_split(
    parallel: Around, module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    first, args, kwargs = _take_first(args, kwargs)
    return _row_linear(parallel, module, forward, (Split.apply(first, -1, parallel.group), *args), kwargs)


def _summed(parallel: Around, module: nn.Module, output: Tensor) -> Tensor:
    if parallel.scatters(module, output):
        result: Tensor = ReduceScatter.apply(output, 1, parallel.group)
    else:
        result = Reduce.apply(output, parallel.group)
    return result


def _embedding_rows(
    parallel: Around, module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Look up this rank's entries of the vocabulary; the others' rows are zero until the sum."""
    ids, args, kwargs = _take_first(args, kwargs)
    layer = wrapped(module)
    sizes = chunk_sizes(layer.num_embeddings, parallel.size)
    start, count = sum(sizes[: parallel.rank]), sizes[parallel.rank]
    here = (ids >= start) & (ids < start + count)
    padding = layer.padding_idx
    # The row that gets no gradient, as this rank numbers it.
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
    return Reduce.apply(rows, parallel.group)


def _embedding_columns(
    parallel: Around, module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    return Gather.apply(forward(*args, **kwargs), -1, wrapped(module).embedding_dim, parallel.group)


def _latent_projection(
    parallel: Around, module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Multi-head latent attention: the rotary part of the output goes straight to this rank's heads, the rest through
    a column-parallel layer, which sums its gradient itself."""
    output = forward(*args, **kwargs)
    rotary = parallel.text_config.qk_rope_head_dim
    latent, rope = output.split([output.shape[-1] - rotary, rotary], dim=-1)
    return torch.cat([latent, Copy.apply(rope, parallel.group)], dim=-1)


def _experts(
    parallel: Around, module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Every rank has a part of every expert: inputs and routing weights are used in parts, outputs are partial."""
    args = tuple(_copied(parallel, value) for value in args)
    kwargs = {name: _copied(parallel, value) for name, value in kwargs.items()}
    return Reduce.apply(forward(*args, **kwargs), parallel.group)


def _copied(parallel: Around, value: Any) -> Any:
    return parallel.copy(value) if isinstance(value, Tensor) and value.is_floating_point() else value


def _identity_expert(
    parallel: Around, module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """An expert without parameters, whole on every rank among experts whose outputs are summed."""
    first, args, kwargs = _take_first(args, kwargs)
    return forward(first / parallel.size, *args, **kwargs)


def _output_summed(
    parallel: Around, module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    output = forward(*args, **kwargs)
    return None if output is None else Reduce.apply(output, parallel.group)


def _on_sequence_shard(
    parallel: Around, module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """A module that treats every position alike, on a part of the positions."""
    first, args, kwargs = _take_first(args, kwargs)
    size = first.shape[1]
    return Gather.apply(forward(Split.apply(first, 1, parallel.group), *args, **kwargs), 1, size, parallel.group)


STYLES: Mapping[str, Style] = {
    "colwise": Style(_columns, _column_linear, needs=LINEAR),
    "colwise_gather_output": Style(_columns, _column_linear_gathered, needs=LINEAR),
    "colwise_rep": Style(_columns, _column_linear_gathered, needs=LINEAR),
    "rowwise": Style(_rows, _row_linear, needs=LINEAR),
    "rowwise_split_input": Style(_rows, _row_linear_split, needs=LINEAR),
    "rowwise_rep": Style(_rows, _row_linear_split, needs=LINEAR),
    "embedding_rowwise": Style(_along(0), _embedding_rows, needs=("num_embeddings",)),
    "embedding_colwise": Style(_along(1), _embedding_columns, needs=("embedding_dim",)),
    "packed_colwise": Style(_packed(-2), _column_linear, needs=LINEAR),
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
"""By the name that plans use."""


def out_features(module: nn.Module) -> int:
    """Output features of a whole linear layer.

    Raises:
        ModelError: the module is no linear layer.
    """
    layer = wrapped(module)
    size = getattr(layer, "nf" if isinstance(layer, Conv1D) else "out_features", None)
    if not isinstance(size, int):
        raise ModelError(f"{type(module).__name__} has no out_features: colwise styles shard linear layers.")
    return size


def _take_first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The input of a module of one input, wherever it was given, and the rest."""
    if args:
        return args[0], args[1:], kwargs
    name = next(iter(kwargs))
    return kwargs[name], (), {key: value for key, value in kwargs.items() if key != name}

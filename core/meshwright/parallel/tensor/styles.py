"""The styles of tensor-parallel plans: placement of a module's parameters, and communication around its forward.

Names and meanings are those of transformers' plans (`base_model_tp_plan`); modules compute on plain local tensors.
Source: Shoeybi et al. 2019, arXiv:1909.08053, for column- and row-parallel layers;
torch.distributed.tensor.parallel.style for the torch styles.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel
from torch.distributed.tensor.placement_types import Placement
from transformers.pytorch_utils import Conv1D

from ..._compat.peft import TransposedFactor, unwrap_base_layer
from ..._compat.torch import get_own_parameters, packed_shard
from ...base.errors import ConfigError, ModelError, suggest_match
from ...step.lm_head import DeferredLogits
from ...tensors.ops import temporary_attribute, temporary_parameters
from .. import ForwardMethod
from .collectives import Copy, Gather, Reduce, ReduceScatter, ShardedVocabulary, Split, chunk_sizes

LINEAR_ATTRIBUTES = ("out_features", "nf")
"""Attributes of linear layers: torch's Linear, and the Conv1D of transformers."""
NUM_PACKED_PARTS = 2
"""A packed parameter concatenates the gate and up projections."""


class TensorParallelContext(Protocol):
    """What a style may use: the axis `tp` and the model's configuration. `TensorParallel` implements it."""

    group: dist.ProcessGroup
    size: int
    rank: int
    text_config: Any

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a replicated tensor as input for sharded layers; its gradient is all-reduced."""

    def is_scattered(self, module: nn.Module, output: Tensor) -> bool:
        """Return whether a row-parallel layer's output is reduce-scattered along the sequence."""


@dataclass(frozen=True)
class TensorParallelStyle:
    """Placement of a module's parameters, and communication around its forward.

    Attributes:
        get_placement: called with (module, parameter name, parameter).
        run_forward: called instead of the module's forward; None: no communication.
        has_partial_gradients: whether each rank's gradients of the parameters are partial, and must be all-reduced.
        required_attributes: the module must have at least one of these; empty: no requirement.
        build_torch_style: creates the equivalent torch style, if there is one.
    """

    get_placement: Callable[[nn.Module, str, Tensor], Placement]
    run_forward: Callable[..., Any] | None = None
    has_partial_gradients: bool = False
    required_attributes: tuple[str, ...] = ()
    build_torch_style: Callable[[], ParallelStyle] | None = None


# -- parameter placement

_INPUT_FIRST_LAYERS = (Conv1D, TransposedFactor)
"""Layers whose weight has the input features in dim 0."""


def _place_replicated(module: nn.Module, name: str, parameter: Tensor) -> Placement:
    return Replicate()


def _place_columns(module: nn.Module, name: str, parameter: Tensor) -> Placement:
    """Shard the output features: (out, in) of a linear layer, (in, out) of `_INPUT_FIRST_LAYERS`, else dim -2."""
    if parameter.dim() == 1:
        return Shard(0)
    return Shard(1 if isinstance(module, _INPUT_FIRST_LAYERS) else parameter.dim() - 2)


def _place_rows(module: nn.Module, name: str, parameter: Tensor) -> Placement:
    """Shard the input features. The bias is replicated, since it is added once, after the reduction."""
    if name == "bias":
        return Replicate()
    return Shard(0 if isinstance(module, _INPUT_FIRST_LAYERS) else parameter.dim() - 1)


def _place_packed_columns(module: nn.Module, name: str, parameter: Tensor) -> Placement:
    return packed_shard(max(parameter.dim() - 2, 0), NUM_PACKED_PARTS)


def _place_packed_rows(module: nn.Module, name: str, parameter: Tensor) -> Placement:
    return Replicate() if parameter.dim() == 1 else packed_shard(parameter.dim() - 1, NUM_PACKED_PARTS)


# -- communication around forward


def _run_column_linear(
    tp: TensorParallelContext, module: nn.Module, forward: ForwardMethod, /, *args: Any, **kwargs: Any
) -> Any:
    first, args, kwargs = _pop_input(args, kwargs)
    layer = unwrap_base_layer(module)
    if not isinstance(layer, Conv1D):
        return forward(tp.copy(first), *args, **kwargs)
    # Conv1D.forward reshapes the output to `nf` features.
    with temporary_attribute(layer, "nf", layer.weight.shape[1]):
        return forward(tp.copy(first), *args, **kwargs)


def _run_column_linear_gathered(
    tp: TensorParallelContext, module: nn.Module, forward: ForwardMethod, /, *args: Any, **kwargs: Any
) -> Any:
    output = _run_column_linear(tp, module, forward, *args, **kwargs)
    if isinstance(output, DeferredLogits):
        return output.with_vocabulary(ShardedVocabulary.from_group(tp.group, get_out_features(module)))
    return Gather.apply(output, -1, get_out_features(module), tp.group)


def _run_row_linear(
    tp: TensorParallelContext, module: nn.Module, forward: ForwardMethod, /, *args: Any, **kwargs: Any
) -> Any:
    layer = unwrap_base_layer(module)
    bias = get_own_parameters(layer).get("bias")
    if bias is None:
        return _reduce_output(tp, module, forward(*args, **kwargs))
    # The bias must be added once, not by every rank.
    with temporary_parameters([(layer, "bias", None if isinstance(layer, nn.Linear) else torch.zeros_like(bias))]):
        output = forward(*args, **kwargs)
    return _reduce_output(tp, module, output) + bias


def _run_row_linear_split(
    tp: TensorParallelContext, module: nn.Module, forward: ForwardMethod, /, *args: Any, **kwargs: Any
) -> Any:
    first, args, kwargs = _pop_input(args, kwargs)
    return _run_row_linear(tp, module, forward, Split.apply(first, -1, tp.group), *args, **kwargs)


def _reduce_output(tp: TensorParallelContext, module: nn.Module, output: Tensor) -> Tensor:
    is_scattered = tp.is_scattered(module, output)
    result: Tensor = ReduceScatter.apply(output, 1, tp.group) if is_scattered else Reduce.apply(output, tp.group)
    return result


def _run_row_embedding(
    tp: TensorParallelContext, module: nn.Module, forward: ForwardMethod, /, *args: Any, **kwargs: Any
) -> Any:
    """Look up this rank's entries of the vocabulary; rows of other entries are zero before the all-reduce."""
    ids, args, kwargs = _pop_input(args, kwargs)
    layer = unwrap_base_layer(module)
    sizes = chunk_sizes(layer.num_embeddings, tp.size)
    start, count = sum(sizes[: tp.rank]), sizes[tp.rank]
    if not count:
        weight = get_own_parameters(layer)["weight"]
        return Reduce.apply(weight.new_zeros(*ids.shape, weight.shape[1]) + weight.sum(), tp.group)
    is_local = (ids >= start) & (ids < start + count)
    padding = layer.padding_idx
    # The row without a gradient, as an index on this rank.
    local_padding_idx = padding - start if isinstance(padding, int) and start <= padding < start + count else None
    with temporary_attribute(layer, "padding_idx", local_padding_idx):
        rows = forward(torch.where(is_local, ids - start, 0), *args, **kwargs)
    return Reduce.apply(torch.where(is_local[..., None], rows, 0.0), tp.group)


def _run_column_embedding(
    tp: TensorParallelContext, module: nn.Module, forward: ForwardMethod, /, *args: Any, **kwargs: Any
) -> Any:
    return Gather.apply(forward(*args, **kwargs), -1, unwrap_base_layer(module).embedding_dim, tp.group)


def _run_latent_projection(
    tp: TensorParallelContext, module: nn.Module, forward: ForwardMethod, /, *args: Any, **kwargs: Any
) -> Any:
    """Multi-head latent attention: this rank's heads use the rotary part of the output, so its gradient is all-reduced
    here. The column-parallel layer after the latent part all-reduces its gradient itself."""
    output = forward(*args, **kwargs)
    rotary = tp.text_config.qk_rope_head_dim
    latent, rope = output.split([output.shape[-1] - rotary, rotary], dim=-1)
    return torch.cat([latent, Copy.apply(rope, tp.group)], dim=-1)


def _run_experts(
    tp: TensorParallelContext, module: nn.Module, forward: ForwardMethod, /, *args: Any, **kwargs: Any
) -> Any:
    """Each rank has a shard of every expert: input and routing-weight gradients and outputs are all-reduced."""

    def copy_floating(value: Any) -> Any:
        return tp.copy(value) if isinstance(value, Tensor) and value.is_floating_point() else value

    output = forward(*map(copy_floating, args), **{name: copy_floating(value) for name, value in kwargs.items()})
    return Reduce.apply(output, tp.group)


def _run_identity_expert(
    tp: TensorParallelContext, module: nn.Module, forward: ForwardMethod, /, *args: Any, **kwargs: Any
) -> Any:
    """Run a replicated expert without parameters among experts whose outputs are all-reduced."""
    first, args, kwargs = _pop_input(args, kwargs)
    return forward(first / tp.size, *args, **kwargs)


def _run_all_reduce(
    tp: TensorParallelContext, module: nn.Module, forward: ForwardMethod, /, *args: Any, **kwargs: Any
) -> Any:
    output = forward(*args, **kwargs)
    return None if output is None else Reduce.apply(output, tp.group)


def _run_on_sequence_shard(
    tp: TensorParallelContext, module: nn.Module, forward: ForwardMethod, /, *args: Any, **kwargs: Any
) -> Any:
    """Run a pointwise module on a slice of the positions."""
    first, args, kwargs = _pop_input(args, kwargs)
    output = forward(Split.apply(first, 1, tp.group), *args, **kwargs)
    return Gather.apply(output, 1, first.shape[1], tp.group)


_TORCH_COLUMN_GATHERED = functools.partial(ColwiseParallel, output_layouts=Replicate())
_TORCH_ROW_SPLIT = functools.partial(RowwiseParallel, input_layouts=Replicate())
STYLES: Mapping[str, TensorParallelStyle] = {
    "colwise": TensorParallelStyle(
        _place_columns, _run_column_linear, required_attributes=LINEAR_ATTRIBUTES, build_torch_style=ColwiseParallel
    ),
    "colwise_gather_output": TensorParallelStyle(
        _place_columns,
        _run_column_linear_gathered,
        required_attributes=LINEAR_ATTRIBUTES,
        build_torch_style=_TORCH_COLUMN_GATHERED,
    ),
    "colwise_rep": TensorParallelStyle(
        _place_columns,
        _run_column_linear_gathered,
        required_attributes=LINEAR_ATTRIBUTES,
        build_torch_style=_TORCH_COLUMN_GATHERED,
    ),
    "rowwise": TensorParallelStyle(
        _place_rows, _run_row_linear, required_attributes=LINEAR_ATTRIBUTES, build_torch_style=RowwiseParallel
    ),
    "rowwise_split_input": TensorParallelStyle(
        _place_rows, _run_row_linear_split, required_attributes=LINEAR_ATTRIBUTES, build_torch_style=_TORCH_ROW_SPLIT
    ),
    "rowwise_rep": TensorParallelStyle(
        _place_rows, _run_row_linear_split, required_attributes=LINEAR_ATTRIBUTES, build_torch_style=_TORCH_ROW_SPLIT
    ),
    "embedding_rowwise": TensorParallelStyle(
        lambda *_: Shard(0),
        _run_row_embedding,
        required_attributes=("num_embeddings",),
        build_torch_style=_TORCH_ROW_SPLIT,
    ),
    "embedding_colwise": TensorParallelStyle(
        lambda *_: Shard(1),
        _run_column_embedding,
        required_attributes=("embedding_dim",),
        build_torch_style=_TORCH_COLUMN_GATHERED,
    ),
    "packed_colwise": TensorParallelStyle(
        _place_packed_columns, _run_column_linear, required_attributes=LINEAR_ATTRIBUTES
    ),
    "packed_rowwise": TensorParallelStyle(_place_packed_rows),
    "replicated_with_grad_allreduce": TensorParallelStyle(_place_replicated, has_partial_gradients=True),
    "mla_kv_a_proj": TensorParallelStyle(_place_replicated, _run_latent_projection),
    "moe_tp_experts": TensorParallelStyle(_place_replicated, _run_experts),
    "moe_identity_expert": TensorParallelStyle(_place_replicated, _run_identity_expert),
    "all_reduce": TensorParallelStyle(_place_replicated, _run_all_reduce),
    "sequence_parallel": TensorParallelStyle(
        _place_replicated, _run_on_sequence_shard, has_partial_gradients=True, build_torch_style=SequenceParallel
    ),
    "local_params": TensorParallelStyle(_place_replicated),
    "replicate": TensorParallelStyle(_place_replicated),
}


def get_out_features(module: nn.Module) -> int:
    """Return the output features of an unsharded linear layer; raise ModelError for other modules."""
    layer = unwrap_base_layer(module)
    size = getattr(layer, "nf" if isinstance(layer, Conv1D) else "out_features", None)
    if not isinstance(size, int):
        raise ModelError(f"{type(module).__name__} has no out_features: colwise styles shard linear layers.")
    return size


def _pop_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Separate the first argument of a forward, positional or keyword, from the others."""
    if args:
        return args[0], args[1:], kwargs
    name = next(iter(kwargs))
    return kwargs[name], (), {key: value for key, value in kwargs.items() if key != name}


# -- torch styles. They turn parameters and activations into DTensors. Each one in a plan is replaced by the meshwright
# style that computes the same. That follows from its layouts: which dim of the weight is sharded, and whether the
# output is gathered. Layouts that shard positions (`Shard(1)`, `SequenceParallel`) enable sequence parallelism.

_SHARDED_POSITIONS = Shard(1)


class NamedStyle(ParallelStyle):
    """A style without a torch equivalent, in a plan of torch styles; `parallelize_module` raises ConfigError."""

    def __init__(self, name: str) -> None:
        self.name = name

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        raise ConfigError(
            f"{type(module).__name__} has the style {self.name!r} of meshwright, which torch's parallelize_module "
            f"cannot apply. Give the plan to meshwright as tp_plan, or leave this entry out of it."
        )

    def __repr__(self) -> str:
        return f"NamedStyle({self.name!r})"


def translate_to_torch_parallel_style(style: str) -> ParallelStyle:
    """Return the torch style for a style name; raise ConfigError if the name is unknown or has no torch equivalent."""
    resolved = STYLES.get(str(style))
    if resolved is None:
        hint = suggest_match(str(style), STYLES)
        raise ConfigError(f"unknown tensor-parallel style {style!r}.{hint} Known: {', '.join(STYLES)}.")
    if resolved.build_torch_style is None:
        raise ConfigError(
            f"style {style!r} has no equal in torch.distributed.tensor.parallel. Use it by its name in a tp_plan; "
            f"torch has: {', '.join(name for name, each in STYLES.items() if each.build_torch_style is not None)}."
        )
    return resolved.build_torch_style()


def uses_sequence_parallel(styles: Iterable[object]) -> bool:
    """Return whether a torch style among these shards positions."""
    torch_styles = [style for style in styles if isinstance(style, ParallelStyle)]
    layouts = (getattr(style, f"{side}_layouts", None) or () for style in torch_styles for side in ("input", "output"))
    return any(isinstance(style, SequenceParallel) for style in torch_styles) or any(
        _SHARDED_POSITIONS in each for each in layouts
    )


def resolve_style(
    style: ParallelStyle | str, name: str, module: nn.Module, *, is_head: bool, source: str
) -> str | None:
    """Return the meshwright style that is equivalent to a torch style; None for `SequenceParallel`, which has none.

    A column-parallel head returns full logits regardless of its output layout, since the loss shards them itself.

    Args:
        source: where the plan comes from, for error messages.

    Raises:
        ConfigError: no style is equivalent.
    """
    if isinstance(style, str):
        return style
    if isinstance(style, NamedStyle):
        return style.name
    if type(style) is SequenceParallel and style.sequence_sharding == (_SHARDED_POSITIONS,):
        return None
    equivalent = _find_equivalent_style(style, isinstance(module, nn.Embedding), is_head)
    if equivalent is None:
        raise ConfigError(
            f"{source} gives {name} the style {style} of torch, which no style of meshwright is equal to. "
            f"Give the name of a style, such as colwise or rowwise."
        )
    return equivalent


_EQUIVALENT_STYLES: Mapping[tuple[Any, ...], str] = {
    (ColwiseParallel, False, Replicate(), Shard(-1)): "colwise",
    (ColwiseParallel, False, Replicate(), Replicate()): "colwise_gather_output",
    (ColwiseParallel, True, Replicate(), Replicate()): "embedding_colwise",
    (RowwiseParallel, False, Shard(-1), Replicate()): "rowwise",
    (RowwiseParallel, False, Replicate(), Replicate()): "rowwise_split_input",
    (RowwiseParallel, True, Replicate(), Replicate()): "embedding_rowwise",
}
"""Keyed by class, whether the module is an embedding, input layout and output layout."""


def _find_equivalent_style(style: Any, is_embedding: bool, is_head: bool) -> str | None:
    if type(style) not in (ColwiseParallel, RowwiseParallel):
        return None
    (input_layout,), (output_layout,) = style.input_layouts, style.output_layouts
    is_colwise = type(style) is ColwiseParallel
    # Under sequence parallelism, a position-sharded layout corresponds to a replicated one.
    input_layout = Replicate() if input_layout == _SHARDED_POSITIONS and (is_colwise or is_embedding) else input_layout
    output_layout = Replicate() if output_layout == _SHARDED_POSITIONS and not is_colwise else output_layout
    if is_colwise and is_head and not is_embedding and input_layout == Replicate():
        return "colwise_gather_output"
    return (
        _EQUIVALENT_STYLES.get((type(style), is_embedding, input_layout, output_layout))
        if style.use_local_output
        else None
    )

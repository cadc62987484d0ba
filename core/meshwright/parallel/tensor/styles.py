"""The styles that a tensor-parallel plan names: where a module's parameters lie, and what is done around its forward.

Names and meanings are those of transformers' plans (`base_model_tp_plan`); modules compute on plain local tensors.
Source: Shoeybi et al. 2019, arXiv:1909.08053, for column- and row-parallel layers;
torch.distributed.tensor.parallel.style for those of torch.
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
"""Attributes of linear layers, torch's and the Conv1D of transformers."""
NUM_PACKED_PARTS = 2
"""Gate and up projection are concatenated in a packed parameter."""


class TensorParallelContext(Protocol):
    """What a style may use: the axis `tp`, and the model around the module. `TensorParallel` is one."""

    group: dist.ProcessGroup
    size: int
    rank: int
    text_config: Any

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a replicated tensor for use in parts."""

    def is_scattered(self, module: nn.Module, output: Tensor) -> bool:
        """Return whether a row-parallel layer's sum is scattered along the sequence."""


@dataclass(frozen=True)
class TensorParallelStyle:
    """Where the parameters of a module lie, given (module, name, parameter), and what `run` does around its forward.

    `partial`: each rank's gradients of the parameters are partial, and are summed. Of the attributes that the module
    `needs` it must have one. `build_torch_style` makes the equal style of torch, if there is one.
    """

    get_placement: Callable[[nn.Module, str, Tensor], Placement]
    run_forward: Callable[..., Any] | None = None
    has_partial_gradients: bool = False
    required_attributes: tuple[str, ...] = ()
    build_torch_style: Callable[[], ParallelStyle] | None = None


# -- where parameters lie

_INPUT_FIRST_LAYERS = (Conv1D, TransposedFactor)
"""Layers whose weight has the input features first."""


def _place_replicated(module: nn.Module, name: str, parameter: Tensor) -> Placement:
    return Replicate()


def _place_columns(module: nn.Module, name: str, parameter: Tensor) -> Placement:
    """Along the output features: (out, in) of a linear layer, (in, out) of `_INPUT_FIRST_LAYERS`, the last dim but one else."""
    if parameter.dim() == 1:
        return Shard(0)
    return Shard(1 if isinstance(module, _INPUT_FIRST_LAYERS) else parameter.dim() - 2)


def _place_rows(module: nn.Module, name: str, parameter: Tensor) -> Placement:
    """Along the input features; the bias is added once, to the sum."""
    if name == "bias":
        return Replicate()
    return Shard(0 if isinstance(module, _INPUT_FIRST_LAYERS) else parameter.dim() - 1)


def _place_packed_columns(module: nn.Module, name: str, parameter: Tensor) -> Placement:
    return packed_shard(max(parameter.dim() - 2, 0), NUM_PACKED_PARTS)


def _place_packed_rows(module: nn.Module, name: str, parameter: Tensor) -> Placement:
    return Replicate() if parameter.dim() == 1 else packed_shard(parameter.dim() - 1, NUM_PACKED_PARTS)


# -- what happens around forward


def _run_column_linear(
    tp: TensorParallelContext, module: nn.Module, forward: ForwardMethod, /, *args: Any, **kwargs: Any
) -> Any:
    first, args, kwargs = _pop_input(args, kwargs)
    layer = unwrap_base_layer(module)
    if not isinstance(layer, Conv1D):
        return forward(tp.copy(first), *args, **kwargs)
    # Its forward shapes the output by `nf`.
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
    scatters = tp.is_scattered(module, output)
    result: Tensor = ReduceScatter.apply(output, 1, tp.group) if scatters else Reduce.apply(output, tp.group)
    return result


def _run_row_embedding(
    tp: TensorParallelContext, module: nn.Module, forward: ForwardMethod, /, *args: Any, **kwargs: Any
) -> Any:
    """Look up this rank's entries of the vocabulary; other rows are zero until the sum."""
    ids, args, kwargs = _pop_input(args, kwargs)
    layer = unwrap_base_layer(module)
    sizes = chunk_sizes(layer.num_embeddings, tp.size)
    start, count = sum(sizes[: tp.rank]), sizes[tp.rank]
    if not count:
        weight = get_own_parameters(layer)["weight"]
        return Reduce.apply(weight.new_zeros(*ids.shape, weight.shape[1]) + weight.sum(), tp.group)
    here = (ids >= start) & (ids < start + count)
    padding = layer.padding_idx
    # The row without a gradient, by its index on this rank.
    own = padding - start if isinstance(padding, int) and start <= padding < start + count else None
    with temporary_attribute(layer, "padding_idx", own):
        rows = forward(torch.where(here, ids - start, 0), *args, **kwargs)
    return Reduce.apply(torch.where(here[..., None], rows, 0.0), tp.group)


def _run_column_embedding(
    tp: TensorParallelContext, module: nn.Module, forward: ForwardMethod, /, *args: Any, **kwargs: Any
) -> Any:
    return Gather.apply(forward(*args, **kwargs), -1, unwrap_base_layer(module).embedding_dim, tp.group)


def _run_latent_projection(
    tp: TensorParallelContext, module: nn.Module, forward: ForwardMethod, /, *args: Any, **kwargs: Any
) -> Any:
    """Multi-head latent attention: the rotary part of the output is used by this rank's heads, the rest by a
    column-parallel layer, which sums its gradient itself."""
    output = forward(*args, **kwargs)
    rotary = tp.text_config.qk_rope_head_dim
    latent, rope = output.split([output.shape[-1] - rotary, rotary], dim=-1)
    return torch.cat([latent, Copy.apply(rope, tp.group)], dim=-1)


def _run_experts(
    tp: TensorParallelContext, module: nn.Module, forward: ForwardMethod, /, *args: Any, **kwargs: Any
) -> Any:
    """Every rank has a part of every expert: inputs and routing weights are used in parts, outputs are partial."""

    def copied(value: Any) -> Any:
        return tp.copy(value) if isinstance(value, Tensor) and value.is_floating_point() else value

    output = forward(*map(copied, args), **{name: copied(value) for name, value in kwargs.items()})
    return Reduce.apply(output, tp.group)


def _run_identity_expert(
    tp: TensorParallelContext, module: nn.Module, forward: ForwardMethod, /, *args: Any, **kwargs: Any
) -> Any:
    """An expert without parameters, replicated among experts whose outputs are summed."""
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
    """A pointwise module, on a part of the positions."""
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
    """Return the output features of a full linear layer; raises ModelError for other modules."""
    layer = unwrap_base_layer(module)
    size = getattr(layer, "nf" if isinstance(layer, Conv1D) else "out_features", None)
    if not isinstance(size, int):
        raise ModelError(f"{type(module).__name__} has no out_features: colwise styles shard linear layers.")
    return size


def _pop_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Split off the input of a module of one input, positional or not."""
    if args:
        return args[0], args[1:], kwargs
    name = next(iter(kwargs))
    return kwargs[name], (), {key: value for key, value in kwargs.items() if key != name}


# -- styles of torch. They make DTensors of parameters and activations; each one in a plan is replaced by the style of
# meshwright that computes the same, which follows from its layouts: which dim of the weight is sharded, and whether the
# output is gathered. Layouts that shard positions (`OptimizerShard(1)`, `SequenceParallel`) turn sequence parallelism on.

_SHARDED_POSITIONS = Shard(1)


class NamedStyle(ParallelStyle):
    """A style of `STYLES` without an equal in torch, in a plan of torch's styles; `parallelize_module` raises."""

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
    """Return the style of torch that a name in a plan stands for; raises ConfigError if there is none."""
    found = STYLES.get(str(style))
    if found is None:
        hint = suggest_match(str(style), STYLES)
        raise ConfigError(f"unknown tensor-parallel style {style!r}.{hint} Known: {', '.join(STYLES)}.")
    if found.build_torch_style is None:
        raise ConfigError(
            f"style {style!r} has no equal in torch.distributed.tensor.parallel. Use it by its name in a tp_plan; "
            f"torch has: {', '.join(name for name, each in STYLES.items() if each.build_torch_style is not None)}."
        )
    return found.build_torch_style()


def uses_sequence_parallel(styles: Iterable[object]) -> bool:
    """Return whether a style of torch among these shards positions."""
    torchs = [style for style in styles if isinstance(style, ParallelStyle)]
    layouts = (getattr(style, f"{side}_layouts", None) or () for style in torchs for side in ("input", "output"))
    return any(isinstance(style, SequenceParallel) for style in torchs) or any(
        _SHARDED_POSITIONS in each for each in layouts
    )


def resolve_style(
    style: ParallelStyle | str, name: str, module: nn.Module, *, is_head: bool, source: str
) -> str | None:
    """Return the style of meshwright that stands for one of torch; None for `SequenceParallel`, which has none.

    A column-parallel head gives full logits, whatever its output layout: the loss shards them by itself. `source` is
    that of the plan, for the ConfigError if no style computes the same.
    """
    if isinstance(style, str):
        return style
    if isinstance(style, NamedStyle):
        return style.name
    if type(style) is SequenceParallel and style.sequence_sharding == (_SHARDED_POSITIONS,):
        return None
    found = _find_equivalent_style(style, isinstance(module, nn.Embedding), is_head)
    if found is None:
        raise ConfigError(
            f"{source} gives {name} the style {style} of torch, which no style of meshwright is equal to. "
            f"Give the name of a style, such as colwise or rowwise."
        )
    return found


_EQUIVALENT_STYLES: Mapping[tuple[Any, ...], str] = {
    (ColwiseParallel, False, Replicate(), Shard(-1)): "colwise",
    (ColwiseParallel, False, Replicate(), Replicate()): "colwise_gather_output",
    (ColwiseParallel, True, Replicate(), Replicate()): "embedding_colwise",
    (RowwiseParallel, False, Shard(-1), Replicate()): "rowwise",
    (RowwiseParallel, False, Replicate(), Replicate()): "rowwise_split_input",
    (RowwiseParallel, True, Replicate(), Replicate()): "embedding_rowwise",
}
"""By class, whether it is an embedding's, and layouts of input and output."""


def _find_equivalent_style(style: Any, is_embedding: bool, is_head: bool) -> str | None:
    if type(style) not in (ColwiseParallel, RowwiseParallel):
        return None
    (taken,), (given,) = style.input_layouts, style.output_layouts
    is_columns = type(style) is ColwiseParallel
    # Replicated is sharded along positions under sequence parallelism.
    taken = Replicate() if taken == _SHARDED_POSITIONS and (is_columns or is_embedding) else taken
    given = Replicate() if given == _SHARDED_POSITIONS and not is_columns else given
    if is_columns and is_head and not is_embedding and taken == Replicate():
        return "colwise_gather_output"
    return _EQUIVALENT_STYLES.get((type(style), is_embedding, taken, given)) if style.use_local_output else None

"""Styles of torch in a plan, said in our own, for strategies whose parameters are plain tensors.

torch's styles make DTensors. What they mean is in their layouts: which dim of weights is sharded, and whether an output
is gathered. Layouts that shard positions (`Shard(1)`, `SequenceParallel`) are sequence parallelism, whose parts are
found by the model's structure.
Source: torch.distributed.tensor.parallel.style.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

from ...base.errors import ConfigError
from ...model.layout import ModelLayout
from .adapters import layer_at
from .plan import Plan

_POSITIONS = Shard(1)


def use_own_styles(plan: Plan, model: nn.Module, layout: ModelLayout) -> bool:
    """Replace the styles of torch in a plan, in place.

    A head that is column-parallel gives whole logits, whatever its output layout: the loss shards them by itself.

    Returns:
        Whether a layout shards positions.

    Raises:
        ConfigError: a style has no equal of ours.
    """
    shards_positions = False
    for name, style in list(plan.modules.items()):
        if not isinstance(style, ParallelStyle):
            continue
        module = layer_at(model, name)
        shards_positions = shards_positions or _shards_positions(style)
        if type(style) is SequenceParallel:
            plan.drop(name, model)
            continue
        own = _own_style(style, module, is_head=name == layout.head)
        if own is None:
            raise ConfigError(
                f"{plan.source} gives {name} the style {type(style).__name__} of torch, which makes DTensors, with "
                f"layouts that no style for plain parameters has. Give a style's name, such as colwise or rowwise."
            )
        plan.name(name, own, model)
    return shards_positions


def _shards_positions(style: Any) -> bool:
    layouts = (*getattr(style, "input_layouts", ()), *getattr(style, "output_layouts", ()))
    return type(style) is SequenceParallel or _POSITIONS in layouts


def _own_style(style: Any, module: nn.Module, *, is_head: bool) -> str | None:
    """The name of our style, or None."""
    if type(style) not in (ColwiseParallel, RowwiseParallel):
        return None
    (taken,), (given,) = style.input_layouts, style.output_layouts
    # Whole, or as sequence parallelism has it.
    whole = (Replicate(), _POSITIONS)
    is_embedding = isinstance(module, nn.Embedding)
    if type(style) is RowwiseParallel:
        if given not in whole or not style.use_local_output:
            return None
        if is_embedding:
            return "embedding_rowwise" if taken in whole else None
        return {Shard(-1): "rowwise", Replicate(): "rowwise_split_input"}.get(taken)
    if taken not in whole:
        return None
    if is_head and not is_embedding:
        return "colwise_gather_output"
    if not style.use_local_output:
        return None
    if is_embedding:
        return "embedding_colwise" if given == Replicate() else None
    return {Shard(-1): "colwise", Replicate(): "colwise_gather_output"}.get(given)

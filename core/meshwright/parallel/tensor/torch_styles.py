"""Styles of torch in a tensor-parallel plan, and the styles of meshwright that they stand for.

torch's styles make DTensors of parameters and activations. Each one in a plan is replaced by the style of meshwright
that computes the same, which follows from its layouts: which dim of the weight is sharded, and whether the output is
gathered. Layouts that shard positions (`Shard(1)`, `SequenceParallel`) turn sequence parallelism on.
Source: torch.distributed.tensor.parallel.style.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

from ...base.errors import ConfigError, nearest
from .styles import STYLES

_POSITIONS = Shard(1)


class NamedStyle(ParallelStyle):
    """A style of meshwright without an equal in torch, in a plan of torch's styles; `parallelize_module` raises.

    Args:
        name: one of `STYLES`.
    """

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
    equals: dict[str, Callable[[], ParallelStyle]] = {
        "colwise": ColwiseParallel,
        "rowwise": RowwiseParallel,
        "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
        "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
        "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
        "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
        "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
        "embedding_colwise": lambda: ColwiseParallel(output_layouts=Replicate()),
        "sequence_parallel": SequenceParallel,
    }
    if str(style) in equals:
        return equals[style]()
    if str(style) in STYLES:
        raise ConfigError(
            f"style {style!r} has no equal in torch.distributed.tensor.parallel. Use it by its name in a tp_plan; "
            f"torch has: {', '.join(equals)}."
        )
    hint = nearest(str(style), STYLES)
    raise ConfigError(f"unknown tensor-parallel style {style!r}.{hint} Known: {', '.join(STYLES)}.")


def shards_positions(styles: Iterable[object]) -> bool:
    """Return whether a style of torch among these shards positions."""
    return any(
        isinstance(style, SequenceParallel)
        or _POSITIONS in (*_layouts(style, "input_layouts"), *_layouts(style, "output_layouts"))
        for style in styles
        if isinstance(style, ParallelStyle)
    )


def own_style(style: ParallelStyle, name: str, module: nn.Module, *, is_head: bool, source: str) -> str | None:
    """Return the name of the style of meshwright that stands for a style of torch.

    A column-parallel head gives full logits, whatever its output layout: the loss shards them by itself.

    Args:
        style: of torch, given to `module` of this name, without adapters.
        is_head: whether that is the model's head.
        source: of the plan, for the ConfigError if no style computes the same.

    Returns:
        The name; None for `SequenceParallel`, whose module stays as it is.
    """
    if isinstance(style, NamedStyle):
        return style.name
    if type(style) is SequenceParallel and style.sequence_sharding == (_POSITIONS,):
        return None
    found = _equal(style, isinstance(module, nn.Embedding), is_head)
    if found is None:
        raise ConfigError(
            f"{source} gives {name} the style {style} of torch, which no style of meshwright is equal to. "
            f"Give the name of a style, such as colwise or rowwise."
        )
    return found


def _equal(style: Any, is_embedding: bool, is_head: bool) -> str | None:
    if type(style) not in (ColwiseParallel, RowwiseParallel):
        return None
    (taken,), (given,) = style.input_layouts, style.output_layouts
    # Replicated, or sharded along positions under sequence parallelism.
    whole = (Replicate(), _POSITIONS)
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


def _layouts(style: object, name: str) -> tuple[Any, ...]:
    return tuple(getattr(style, name, None) or ())

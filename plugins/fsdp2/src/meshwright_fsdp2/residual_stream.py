"""Keep the residual stream of a model in a wider dtype than its weights, under autocast.

[Note: wide stream] With `autocast_dtype` and an `output_dtype` wider than that, embeddings are cast to `output_dtype`,
and hidden states enter and leave each block so. Within a block autocast casts what matrix products take: what a branch
adds is narrow, and what it is added to stays wide. CUDA's autocast runs norms in float32. The CPU's knows no such rule,
and the CPU's norms take no input wider than their weights, so the rule is applied here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.model.forward_order import Layer, put_around
from meshwright.model.layout import ModelLayout


def widen_stream(model: nn.Module, layout: ModelLayout, dtype: torch.dtype) -> None:
    """Let hidden states leave the embedding and enter blocks in a dtype; see [Note: wide stream].

    Args:
        model: before sharding.
        layout: of the model.
        dtype: of the stream.
    """
    if layout.embedding is not None:
        model.get_submodule(layout.embedding).register_forward_hook(lambda _, args, output: _cast(output, dtype))
    for block in dict.fromkeys(map(model.get_submodule, layout.blocks)):
        block.register_forward_pre_hook(functools.partial(_widened, dtype), with_kwargs=True)


def widen_norms(model: nn.Module) -> None:
    """Let norms of torch compute in float32, as CUDA's autocast does; see [Note: wide stream].

    A norm with a forward of its own computes in the dtype of its weights.
    """
    for module in model.modules():
        if type(module).forward in (nn.LayerNorm.forward, nn.GroupNorm.forward):
            put_around(module, Layer.STRATEGY, functools.partial(_in_float32, module))
        elif isinstance(module, nn.LayerNorm | nn.GroupNorm):
            module.register_forward_pre_hook(lambda norm, args: (_cast(args[0], norm.weight.dtype), *args[1:]))


def _widened(
    dtype: torch.dtype, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    # Hidden states come first, by position or by name; masks and angles keep their dtype.
    if args:
        return (_cast(args[0], dtype), *args[1:]), kwargs
    return args, {name: _cast(value, dtype) if name == "hidden_states" else value for name, value in kwargs.items()}


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _in_float32(norm: nn.LayerNorm | nn.GroupNorm, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def forward(hidden: Tensor) -> Tensor:
        weight, bias = (None if each is None else each.float() for each in (norm.weight, norm.bias))
        if isinstance(norm, nn.LayerNorm):
            return functional.layer_norm(hidden.float(), norm.normalized_shape, weight, bias, norm.eps)
        return functional.group_norm(hidden.float(), norm.num_groups, weight, bias, norm.eps)

    return forward

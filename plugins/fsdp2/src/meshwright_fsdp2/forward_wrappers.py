"""Wrappers of a model's forward: contexts, `patch_is_packed_sequence`, and dtypes of the residual stream.

[Note: wide residual stream] With `autocast_dtype` and a wider `output_dtype`, the embedding's output and the hidden
states that enter and leave each block have `output_dtype`. Within a block autocast casts the operands of matrix
products, so a branch's output is narrow and the residual stream that it is added to stays wide. On CUDA, autocast runs
norms in float32. On the CPU it does not, and the CPU's norms do not accept an input wider than their weights, so
`compute_norms_in_float32` applies CUDA's rule.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.plugin import Batch, BatchError, ModelLayout, StrategyError, WrapOrder, wrap_forward

from ._compat import disable_packed_sequence_check


def run_forward_in_context(
    model: nn.Module, build_context: Callable[[Mapping[str, Any]], AbstractContextManager[Any]]
) -> None:
    """Run the model's own forward in a context built from its arguments by name, inside the hooks of sharding."""

    def wrap(forward: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(forward)

        @functools.wraps(forward)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            arguments = signature.bind_partial(*args).arguments if args else {}
            with build_context({**arguments, **kwargs}):
                return forward(*args, **kwargs)

        return wrapped

    wrap_forward(model, WrapOrder.STRATEGY, wrap)


def cast_residual_stream(model: nn.Module, layout: ModelLayout, dtype: torch.dtype) -> None:
    """Cast hidden states at the embedding and at blocks, before sharding; see [Note: wide residual stream]."""
    if layout.embedding is not None:
        model.get_submodule(layout.embedding).register_forward_hook(lambda _, args, output: _cast(output, dtype))
    for block in dict.fromkeys(map(model.get_submodule, layout.blocks)):
        block.register_forward_pre_hook(functools.partial(_cast_block_input, dtype), with_kwargs=True)


def compute_norms_in_float32(model: nn.Module) -> None:
    """Make torch's norms compute in float32; norm subclasses with their own forward compute in their weights' dtype."""
    for module in model.modules():
        if type(module).forward in (nn.LayerNorm.forward, nn.GroupNorm.forward):
            wrap_forward(module, WrapOrder.STRATEGY, functools.partial(_build_float32_norm, module))
        elif isinstance(module, nn.LayerNorm | nn.GroupNorm):
            module.register_forward_pre_hook(lambda norm, args: (_cast(args[0], norm.weight.dtype), *args[1:]))


def _cast_block_input(
    dtype: torch.dtype, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    # Hidden states are the first argument, positional or named; masks and rotary embeddings keep their dtype.
    if args:
        return (_cast(args[0], dtype), *args[1:]), kwargs
    return args, {name: _cast(value, dtype) if name == "hidden_states" else value for name, value in kwargs.items()}


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _build_float32_norm(norm: nn.LayerNorm | nn.GroupNorm, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def forward(hidden: Tensor) -> Tensor:
        weight, bias = (None if each is None else each.float() for each in (norm.weight, norm.bias))
        if isinstance(norm, nn.LayerNorm):
            return functional.layer_norm(hidden.float(), norm.normalized_shape, weight, bias, norm.eps)
        return functional.group_norm(hidden.float(), norm.num_groups, weight, bias, norm.eps)

    return forward


@contextmanager
def skip_packed_sequence_check() -> Iterator[None]:
    """Make transformers treat no sequence as packed within the context.

    Raises:
        StrategyError: this version of transformers has no such check.
    """
    with disable_packed_sequence_check() as has_check:
        if not has_check:
            raise StrategyError(
                "patch_is_packed_sequence=true, but this version of transformers has no check to be patched. "
                "Set patch_is_packed_sequence=false."
            )
        yield


def check_not_packed(microbatches: Sequence[Batch]) -> None:
    """Raise BatchError for packed data, since attention would cross documents. Synchronizes with the device."""
    # Other checks reject anything that is not a sequence of mappings.
    batches = microbatches if isinstance(microbatches, Sequence) else ()
    for index, batch in enumerate(batches):
        positions = batch.get("position_ids") if isinstance(batch, Mapping) else None
        if positions is not None and bool((positions.diff(dim=-1) <= 0).any()):
            raise BatchError(
                f"microbatch {index} of {len(batches)} is packed: its position_ids restart, but "
                f"patch_is_packed_sequence=true takes every sequence for one document. "
                f"Set patch_is_packed_sequence=false for packed data."
            )


# Kept alive, since its deletion would restore the check.
_process_wide_patches = ExitStack()


@functools.cache
def _patch_is_packed_sequence_for_training() -> None:
    """Disable the check for the rest of the process, for training loops of the reference. Not for packed data."""
    _process_wide_patches.enter_context(skip_packed_sequence_check())

"""How a model's forward is called: its options, and the sequence length that its rotary embeddings get.

[Note: rope length] transformers' `longrope` and `dynamic` choose frequencies by the largest position of a forward, over
all rows, and `dynamic` keeps those of the longest forward so far. Within a step they get the longest row of all
microbatches of all ranks, so that no row depends on others; outside of steps, the length of the forward alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from .._compat.transformers import find_length_dependent_ropes, reset_dynamic_rope
from ..tensors.ops import temporary_attribute


def get_forward_options(model: nn.Module, *, is_partial: bool = False) -> dict[str, Any]:
    """Return the options with which a model's forward is always called: no key-value cache, as far as it takes them."""
    options = {"use_cache": False} | ({"output_router_logits": False} if is_partial else {})
    taken = inspect.signature(model.forward).parameters
    names = set(taken)
    if any(each.kind is each.VAR_KEYWORD for each in taken.values()):
        # Some classes do not name it, and hand it on to the model inside; peft's wrapper hands on all.
        base = _get_base_model(model)
        names |= set(inspect.signature(base.forward).parameters)
        names |= {"use_cache"} & set(inspect.signature(getattr(base, "base_model", base).forward).parameters)
    return {name: value for name, value in options.items() if name in names}


def get_forward_arguments(model: nn.Module) -> frozenset[str]:
    """Return the names of a forward's arguments; other entries of a batch belong to the objective."""
    signatures = (inspect.signature(each.forward) for each in (model, _get_base_model(model)))
    return frozenset(name for each in signatures for name in each.parameters)


def _get_base_model(model: nn.Module) -> nn.Module:
    found: nn.Module = model.get_base_model() if hasattr(model, "get_base_model") else model
    return found


def enable_router_logits(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return `get_forward_options` for a run that returns the logits of all routers."""
    return {name: value or name == "output_router_logits" for name, value in options.items()}


class RopeLengthHook:
    def __init__(self, model: nn.Module) -> None:
        self._length: int | None = None
        for rope in find_length_dependent_ropes(model):
            rope.register_forward_pre_hook(_reset_length, with_kwargs=True)
            rope.register_forward_pre_hook(self._extend_positions, with_kwargs=True)
            rope.register_forward_hook(self._trim_output)

    def step_length(self, length: int) -> AbstractContextManager[None]:
        """Set the length [tokens] of the longest row of a step, on all ranks."""
        return temporary_attribute(self, "_length", length)

    def _extend_positions(
        self, rope: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any] | None:
        """Append the last position of the longest row, the largest of all."""
        if self._length is None:
            return None
        hidden, positions, *rest = _get_rope_arguments(args, kwargs)
        last = positions.new_full((*positions.shape[:-1], 1), self._length - 1)
        return (hidden, torch.cat([positions, last], dim=-1), *rest), {}

    def _trim_output(self, rope: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if self._length is None:
            return None
        return tuple(each[..., :-1, :] for each in output) if isinstance(output, tuple) else output[..., :-1, :]


@contextmanager
def reset_rope_length(model: nn.Module) -> Iterator[None]:
    """Context in which no forward depends on the length of the one before."""
    with ExitStack() as hooks:
        for rope in find_length_dependent_ropes(model):
            hooks.callback(rope.register_forward_pre_hook(_reset_length, with_kwargs=True).remove)
        yield


def _reset_length(rope: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    hidden, _, *rest = _get_rope_arguments(args, kwargs)
    reset_dynamic_rope(rope, hidden, *rest)


def _get_rope_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return hidden states, positions (..., S), and the type of the layer if it is given."""
    given = dict(zip(("x", "position_ids", "layer_type"), args, strict=False)) | kwargs
    return tuple(given[name] for name in ("x", "position_ids", "layer_type") if given.get(name) is not None)

"""Options of a model's forward, and the sequence length that its rotary embeddings see.

[Note: rope length] transformers' `longrope` and `dynamic` choose frequencies by the largest position of a forward, over
all rows, and `dynamic` keeps those of the longest forward so far. Within a step, they see the longest row of all
microbatches of all ranks, so that all rows use the same frequencies. Outside of steps, they see the length of the
current forward only.
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
    """Return the keyword arguments for every forward of a model, as far as it accepts them: no key-value cache.

    `is_partial`: this rank has only some positions or layers, so it does not request router logits.
    """
    options = {"use_cache": False} | ({"output_router_logits": False} if is_partial else {})
    taken = inspect.signature(model.forward).parameters
    names = set(taken)
    if any(each.kind is each.VAR_KEYWORD for each in taken.values()):
        # Some classes accept it only as **kwargs and pass it to their inner model; peft's wrapper passes on everything.
        base = _get_base_model(model)
        names |= set(inspect.signature(base.forward).parameters)
        names |= {"use_cache"} & set(inspect.signature(getattr(base, "base_model", base).forward).parameters)
    return {name: value for name, value in options.items() if name in names}


def get_forward_arguments(model: nn.Module) -> frozenset[str]:
    """Return the names of a forward's arguments; other entries of a batch belong to the objective."""
    signatures = (inspect.signature(each.forward) for each in (model, _get_base_model(model)))
    return frozenset(name for each in signatures for name in each.parameters)


def _get_base_model(model: nn.Module) -> nn.Module:
    base: nn.Module = model.get_base_model() if hasattr(model, "get_base_model") else model
    return base


def enable_router_logits(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `get_forward_options` with router logits enabled."""
    return {name: value or name == "output_router_logits" for name, value in options.items()}


class RopeLengthHook:
    def __init__(self, model: nn.Module) -> None:
        self._length: int | None = None
        for rope in find_length_dependent_ropes(model):
            rope.register_forward_pre_hook(_reset_length, with_kwargs=True)
            rope.register_forward_pre_hook(self._extend_positions, with_kwargs=True)
            rope.register_forward_hook(self._trim_output)

    def step_length(self, length: int) -> AbstractContextManager[None]:
        """Context of a step whose longest row, over all ranks, has `length` tokens."""
        return temporary_attribute(self, "_length", length)

    def _extend_positions(
        self, rope: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any] | None:
        """Append the last position of the longest row."""
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
    """Context in which no forward depends on the length of the previous one."""
    with ExitStack() as hooks:
        for rope in find_length_dependent_ropes(model):
            hooks.callback(rope.register_forward_pre_hook(_reset_length, with_kwargs=True).remove)
        yield


def _reset_length(rope: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    hidden, _, *rest = _get_rope_arguments(args, kwargs)
    reset_dynamic_rope(rope, hidden, *rest)


def _get_rope_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return hidden states, positions (..., S), and the layer type if it is passed."""
    arguments = dict(zip(("x", "position_ids", "layer_type"), args, strict=False)) | kwargs
    return tuple(arguments[name] for name in ("x", "position_ids", "layer_type") if arguments.get(name) is not None)

"""Rotary embeddings whose frequencies depend on the sequence length, given one length for a whole step.

transformers' `longrope` and `dynamic` choose frequencies by the largest position of a forward, over all rows, and
`dynamic` keeps those of the longest forward so far. So a row's frequencies would depend on other rows and steps. Within
a step they get the longest row of all microbatches of all ranks; outside of steps, the length of the forward alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .._compat.transformers import forget_length, length_dependent_ropes


class RopeLength:
    """The length given to the rotary embeddings of one model.

    Args:
        model: unsharded. Embeddings that do not depend on the length are left alone.
    """

    def __init__(self, model: nn.Module) -> None:
        self._length: int | None = None
        for rope in length_dependent_ropes(model):
            rope.register_forward_pre_hook(_forget, with_kwargs=True)
            rope.register_forward_pre_hook(self._before, with_kwargs=True)
            rope.register_forward_hook(self._after)

    @contextmanager
    def within_step(self, length: int) -> Iterator[None]:
        """Set the length [tokens] of the longest row of a step, on all ranks."""
        self._length = length
        try:
            yield
        finally:
            self._length = None

    def _before(self, rope: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        """Append the last position of the longest row, the largest of all."""
        if self._length is None:
            return None
        hidden, positions, *rest = _arguments(args, kwargs)
        last = positions.new_full((*positions.shape[:-1], 1), self._length - 1)
        return (hidden, torch.cat([positions, last], dim=-1), *rest), {}

    def _after(self, rope: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if self._length is None:
            return None
        return tuple(map(_without_last, output)) if isinstance(output, tuple) else _without_last(output)


@contextmanager
def without_history(model: nn.Module) -> Iterator[None]:
    """Context in which no forward depends on the length of the one before."""
    with ExitStack() as hooks:
        for rope in length_dependent_ropes(model):
            hooks.callback(rope.register_forward_pre_hook(_forget, with_kwargs=True).remove)
        yield


def _forget(rope: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    hidden, _, *rest = _arguments(args, kwargs)
    forget_length(rope, hidden, *rest)


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return hidden states, positions (..., S), and the type of the layer if it is given."""
    given = dict(zip(("x", "position_ids", "layer_type"), args, strict=False)) | kwargs
    return tuple(given[name] for name in ("x", "position_ids", "layer_type") if given.get(name) is not None)


def _without_last(table: Tensor) -> Tensor:
    return table[..., :-1, :]

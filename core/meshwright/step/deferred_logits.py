"""Logits that a model passes on before any of them is computed.

While the loss is computed by rows, the head returns `DeferredLogits`. What the model does to them (scaling, a soft cap,
a cast) is recorded and applied to the logits of each row later. Only operations that treat every entry alike are
recorded; all others are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..base.errors import ModelError
from .token_statistics import WHOLE, Vocabulary

_CASTS = frozenset({"to", "float", "double", "half", "bfloat16", "contiguous"})
_ENTRYWISE = _CASTS | {"mul", "rmul", "div", "truediv", "true_divide", "add", "radd", "sub", "neg", "tanh"}
_QUESTIONS = frozenset(
    {"__get__", "__len__", "size", "dim", "ndimension", "numel", "nelement", "is_floating_point", "is_contiguous"}
)
_VALUES = (bool, int, float, type(None), torch.dtype, torch.memory_format)


class RowsError(ModelError):
    """The logits of a model cannot be computed row by row."""


@dataclass(frozen=True)
class Source:
    """Where logits come from.

    Attributes:
        hidden: input of the head, (..., H).
        run: the head: (..., H) to (..., L), for L entries of the vocabulary.
        steps: what was done to its result.
        only_casts: the steps are casts to dtypes that lose nothing.
        vocabulary: how the entries are divided over ranks.
    """

    hidden: Tensor
    run: Callable[[Tensor], Tensor]
    steps: tuple[Callable[[Tensor], Tensor], ...] = ()
    only_casts: bool = True
    vocabulary: Vocabulary = WHOLE

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute the logits of some rows of hidden states, (..., H)."""
        logits = self.run(hidden)
        for step in self.steps:
            logits = step(logits)
        return logits


class DeferredLogits(Tensor):
    """See the module. Has a shape and a dtype, and reports the device of the hidden states."""

    source: Source

    @staticmethod
    def of(source: Source, features: int, dtype: torch.dtype) -> DeferredLogits:
        shape = (*source.hidden.shape[:-1], features)
        made = torch.empty(shape, dtype=dtype, device="meta").as_subclass(DeferredLogits)
        made.source = source
        return made

    def divided(self, vocabulary: Vocabulary) -> DeferredLogits:
        """Return the same as a part of a vocabulary that ranks share."""
        return DeferredLogits.of(replace(self.source, vocabulary=vocabulary), self.shape[-1], self.dtype)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        name = func.__name__
        if func == Tensor.device.__get__:
            return args[0].source.hidden.device
        if name in _QUESTIONS:
            answer = super().__torch_function__(func, types, tuple(args), options)
            if not isinstance(answer, Tensor):
                return answer
        if name == "view_as" and all(each is args[0] for each in args):
            # By which strategies tell what a module gives from what it was given.
            return args[0]
        places = [index for index, each in enumerate(args) if isinstance(each, DeferredLogits)]
        rest = [each for index, each in enumerate(args) if index not in places] + list(options.values())
        operation = name.removeprefix("__").removesuffix("__")
        if operation not in _ENTRYWISE or len(places) != 1 or not all(map(_is_one_for_all, rest)):
            raise RowsError(f"what {name} makes of its logits is not known row by row")
        return _after(func, list(args), places[0], options, loses_nothing=operation in _CASTS)

    def __repr__(self, **_: Any) -> str:
        return f"DeferredLogits({tuple(self.shape)}, {self.dtype})"


def _is_one_for_all(value: Any) -> bool:
    """Return whether an operand is the same for all entries and does not train."""
    if isinstance(value, Tensor):
        return value.dim() == 0 and not value.requires_grad
    return isinstance(value, _VALUES)


def _after(func: Any, args: list[Any], place: int, options: dict[str, Any], *, loses_nothing: bool) -> DeferredLogits:
    """Return the logits that an entrywise function will make of one of its arguments."""
    before: DeferredLogits = args[place]

    def step(logits: Tensor) -> Tensor:
        made: Tensor = func(*args[:place], logits, *args[place + 1 :], **options)
        return made

    # One entry tells the dtype.
    dtype = step(torch.zeros((1, 1), dtype=before.dtype, device=before.source.hidden.device)).dtype
    loses_nothing = loses_nothing and torch.promote_types(dtype, before.dtype) == dtype
    args[place] = None
    steps, only_casts = (*before.source.steps, step), before.source.only_casts and loses_nothing
    source = replace(before.source, steps=steps, only_casts=only_casts)
    return DeferredLogits.of(source, before.shape[-1], dtype)

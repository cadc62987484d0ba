"""Loss and statistics of tokens from rows of hidden states, with logits of one chunk of rows at a time.

[Note: by rows] The gradient of the loss is known up to a factor, so gradients of hidden states and weights are computed
while a chunk's logits are there, and backward only scales them. For other uses, and while such gradients still wait for
their backward (in a pipeline), rows are computed once more in backward. In half precision each product is rounded as
for whole logits; the sum of a weight's gradient over chunks is rounded once for each chunk.

Shapes: N rows, one for each position of a microbatch, H features each, C of them in a chunk, K ids for each; V entries
of the vocabulary, L of them on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ..base.errors import StrategyError
from ..base.types import TokenStatistic
from .token_statistics import WHOLE, Exponentials, Measures, Vocabulary, measure


@dataclass(frozen=True)
class Projection:
    """What makes logits (C, L) of rows (C, H), each by itself; `is_linear`: it is `F.linear(rows_CH, *tensors)`."""

    call: Callable[[Tensor, Sequence[Tensor]], Tensor]
    is_linear: bool
    vocabulary: Vocabulary = WHOLE


@dataclass(frozen=True)
class Rows:
    """Rows of hidden states, contiguous, and what makes logits of them, with tensors such as a head's weight."""

    hidden_NH: Tensor
    tensors: tuple[Tensor, ...]
    projection: Projection

    @classmethod
    def linear(
        cls, hidden: Tensor, weight_LH: Tensor, bias_L: Tensor | None = None, *, vocabulary: Vocabulary = WHOLE
    ) -> Rows:
        """Return the rows of (..., H) before a linear head, all of one dtype."""
        tensors = (weight_LH,) if bias_L is None else (weight_LH, bias_L)
        hidden_NH = hidden.reshape(-1, hidden.shape[-1]).contiguous()
        return cls(hidden_NH, tensors, Projection(lambda x, given: F.linear(x, *given), True, vocabulary))

    @classmethod
    def of_logits(cls, logits: Tensor, *, vocabulary: Vocabulary = WHOLE) -> Rows:
        """Return the rows of existing logits, (..., L)."""
        # A rank may have no entry, from which a number of rows cannot be found.
        flat = logits.reshape(logits.shape[:-1].numel(), logits.shape[-1]).contiguous()
        return cls(flat, (), Projection(lambda x, given: x, False, vocabulary))


def token_statistics(
    rows: Rows, ids_NK: Tensor, names: Sequence[TokenStatistic], *, chunk_rows: int
) -> dict[str, Tensor]:
    """Compute statistics of tokens, with gradients except for "is_top1". Collective if ranks share the vocabulary.

    `ids_NK` are int64, K >= 0 for each row, `IGNORED_LABEL` for none; "is_top1" is about the first. Returns (N,), or
    (N, K) for "log_probs", float32 or wider. At most `chunk_rows` rows have logits at a time.
    """
    if not names:
        return {}
    if "log_probs" not in names:
        ids_NK = ids_NK[:, : int("is_top1" in names)]
    values = _Statistics.apply(rows.projection, ids_NK, tuple(names), chunk_rows, rows.hidden_NH, *rows.tensors)
    return dict(zip(names, values, strict=True))


def token_loss(
    rows: Rows, targets_N: Tensor, num_tokens: Tensor, *, chunk_rows: int, waiting: WeakSet[Any] | None = None
) -> Tensor:
    """Sum the cross entropy of `targets_N` [nats], divided by `num_tokens`; scalar. See [Note: by rows].

    `waiting`: gradients of losses with the same weights that no backward has taken yet; this loss adds its own.
    """
    factor = torch.ones((), dtype=_wide(rows.hidden_NH.dtype), device=targets_N.device) / num_tokens
    inputs = (rows.hidden_NH, *rows.tensors)
    has_gradient = torch.is_grad_enabled() and any(each.requires_grad for each in inputs)
    if has_gradient and waiting:
        (values,) = token_statistics(rows, targets_N[:, None], ["log_probs"], chunk_rows=chunk_rows).values()
        return -values.sum() * factor
    needs = [has_gradient and each.requires_grad for each in inputs]
    loss: Tensor = _Loss.apply(rows.projection, targets_N, factor, chunk_rows, needs, waiting, *inputs)
    return loss


# -- chunks


def _parts(rows: int, chunk_rows: int) -> Iterator[slice]:
    count = -(-rows // chunk_rows)
    bounds = [index * rows // count for index in range(count + 1)] if count else [0]
    return (slice(start, stop) for start, stop in pairwise(bounds))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class _Chunk:
    """The logits of some rows, and a way back to rows and tensors."""

    def __init__(self, projection: Projection, rows_CH: Tensor, tensors: Sequence[Tensor], needs: Sequence[bool]):
        self.projection, self.needs = projection, needs
        self._linear, self._tensors = projection.is_linear, tensors
        records = not self._linear and any(needs)
        self._rows_CH = rows_CH.detach().requires_grad_() if records and needs[0] else rows_CH
        with torch.set_grad_enabled(records):
            self._logits_CL = projection.call(self._rows_CH, tensors)

    @property
    def dtype(self) -> torch.dtype:
        return self._logits_CL.dtype

    def wide(self) -> Tensor:
        """Return the logits in memory that may be overwritten; once."""
        logits_CL = self._logits_CL.detach()
        dtype = _wide(logits_CL.dtype)
        # What was recorded may have saved them, and what nothing was done to is the input.
        owned = logits_CL.to(dtype, copy=not self._linear)
        if self._linear:
            self._logits_CL = self._logits_CL.new_empty(0)
        return owned

    def add(self, gradient_CL: Tensor, part: slice, sums: Sums) -> None:
        """Add to the gradients of rows and tensors what a gradient of the logits contributes."""
        if not self._linear:
            inputs = [self._rows_CH, *self._tensors]
            asked = [index for index, needed in enumerate(self.needs) if needed]
            found = torch.autograd.grad(
                self._logits_CL, [inputs[index] for index in asked], gradient_CL, allow_unused=True
            )
            for index, each in zip(asked, found, strict=True):
                sums.add(index, each, part)
            return
        if self.needs[0] and sums.hidden_NH is not None:
            torch.mm(gradient_CL, self._tensors[0], out=sums.hidden_NH[part])
        if self.needs[1]:
            sums.add_product(gradient_CL.t(), self._rows_CH)
        if len(self.needs) > 2 and self.needs[2]:
            sums.add(2, gradient_CL.sum(0), part)


class Sums:
    """Gradients of hidden states and tensors, to which chunks add theirs."""

    def __init__(self, hidden_NH: Tensor, needs: Sequence[bool]) -> None:
        self.hidden_NH = torch.empty_like(hidden_NH) if needs[0] else None
        self._tensors: list[Tensor | None] = [None] * (len(needs) - 1)

    def add(self, index: int, gradient: Tensor | None, part: slice) -> None:
        if index == 0 and self.hidden_NH is not None:
            self.hidden_NH[part] = 0.0 if gradient is None else gradient
        elif index > 0 and gradient is not None:
            before = self._tensors[index - 1]
            self._tensors[index - 1] = gradient if before is None else before.add_(gradient)

    def add_product(self, left_LC: Tensor, right_CH: Tensor) -> None:
        before = self._tensors[0]
        self._tensors[0] = left_LC @ right_CH if before is None else before.addmm_(left_LC, right_CH)

    @property
    def all(self) -> list[Tensor | None]:
        return [self.hidden_NH, *self._tensors]


def _add_loss(chunk: _Chunk, part: slice, targets_C1: Tensor, factor: Tensor, sums: Sums) -> Tensor:
    """Return the sum of a chunk's log-probabilities; add `factor` times the gradients of the loss to `sums`."""
    vocabulary = chunk.projection.vocabulary
    measures, exponentials = measure(chunk.wide(), targets_C1, vocabulary, ["log_probs"])
    if any(chunk.needs):
        weights: dict[TokenStatistic, Tensor] = {"log_probs": -factor.expand(targets_C1.shape)}
        chunk.add(exponentials.gradient(measures, targets_C1, vocabulary, weights, chunk.dtype), part, sums)
    return measures.values("log_probs", targets_C1).sum()


# -- autograd


class _Loss(torch.autograd.Function):
    """See `token_loss`; gradients are computed in forward."""

    @staticmethod
    def forward(
        ctx: Any,
        projection: Projection,
        targets_N: Tensor,
        factor: Tensor,
        chunk_rows: int,
        needs: Sequence[bool],
        waiting: WeakSet[Any] | None,
        hidden_NH: Tensor,
        *tensors: Tensor,
    ) -> Tensor:
        sums, total = Sums(hidden_NH, needs), factor.new_zeros(())
        for part in _parts(hidden_NH.shape[0], chunk_rows):
            chunk = _Chunk(projection, hidden_NH[part], tensors, needs)
            total -= _add_loss(chunk, part, targets_N[part, None], factor, sums)
            # Its logits must not outlive it until the next chunk has others.
            del chunk
        ctx.sums = sums
        if waiting is not None and any(needs):
            waiting.add(sums)
        return total.mul_(factor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        sums, ctx.sums = ctx.sums, None
        if sums is None:
            raise StrategyError(
                "the backward of a token loss was run twice; its gradients are made once. Compute it anew."
            )
        return (None,) * 6 + tuple(None if each is None else each.mul_(grad) for each in sums.all)


class _Statistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        projection: Projection,
        ids_NK: Tensor,
        names: tuple[TokenStatistic, ...],
        chunk_rows: int,
        hidden_NH: Tensor,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        found, kept = [], []
        for part in _parts(hidden_NH.shape[0], chunk_rows):
            chunk = _Chunk(projection, hidden_NH[part], tensors, [False] * (1 + len(tensors)))
            measures, _ = measure(chunk.wide(), ids_NK[part], projection.vocabulary, names)
            del chunk, _
            found.append([measures.values(name, ids_NK[part]) for name in names])
            expected_C = measures.log_sum if measures.expected is None else measures.expected
            kept.append(torch.stack([measures.log_sum, expected_C]))
        ctx.projection, ctx.names, ctx.chunk_rows = projection, names, chunk_rows
        ctx.save_for_backward(ids_NK, torch.cat(kept, 1), hidden_NH, *tensors)
        values = tuple(torch.cat(parts) for parts in zip(*found, strict=True))
        ctx.mark_non_differentiable(*(each for each in values if not each.is_floating_point()))
        ctx.set_materialize_grads(False)
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        ids_NK, kept, hidden_NH, *tensors = ctx.saved_tensors
        needs = ctx.needs_input_grad[4:]
        vocabulary, sums = ctx.projection.vocabulary, Sums(hidden_NH, needs)
        given = {name: grad for name, grad in zip(ctx.names, grads, strict=True) if grad is not None}
        for part in _parts(hidden_NH.shape[0], ctx.chunk_rows):
            chunk = _Chunk(ctx.projection, hidden_NH[part], tensors, needs)
            # What ranks have exchanged in forward is known, and logits of ids are not asked for.
            measures = Measures(kept[0, part], kept[0, part], kept[0, part, None], kept[1, part])
            weights = {name: grad[part] for name, grad in given.items()}
            exponentials = Exponentials(chunk.wide())
            chunk.add(exponentials.gradient(measures, ids_NK[part], vocabulary, weights, chunk.dtype), part, sums)
            del chunk, exponentials
        return (None,) * 4 + tuple(sums.all)

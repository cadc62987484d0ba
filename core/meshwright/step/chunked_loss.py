"""Token loss and statistics from rows of hidden states, with the logits of one chunk of rows at a time.

[Note: chunks of rows] The gradient of the loss is known up to a factor. So the gradients of hidden states and weights
are computed in forward, while a chunk's logits exist, and backward only scales them. Statistics recompute the logits in
backward instead; so does the loss while such gradients of an earlier loss are pending (in a pipeline). In half
precision, each product is rounded as for full logits. A weight's gradient is rounded once for each chunk.

Shapes: N rows, one for each position of a microbatch; C rows of a chunk; H features and K ids of each row; L entries of
the vocabulary on this rank.
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
from .row_statistics import (
    UNSHARDED_VOCABULARY,
    RowStatistics,
    ShiftedExponentials,
    Vocabulary,
    compute_row_statistics,
)


@dataclass(frozen=True)
class Projection:
    """Maps rows (C, H) to logits (C, L), each row separately; `is_linear`: it is `F.linear(rows_CH, *tensors)`."""

    compute_logits: Callable[[Tensor, Sequence[Tensor]], Tensor]
    is_linear: bool
    vocabulary: Vocabulary = UNSHARDED_VOCABULARY


@dataclass(frozen=True)
class HiddenRows:
    """Contiguous rows of hidden states, and their projection to logits with its tensors, such as a head's weight."""

    hidden_NH: Tensor
    tensors: tuple[Tensor, ...]
    projection: Projection

    @classmethod
    def from_linear(
        cls,
        hidden: Tensor,
        weight_LH: Tensor,
        bias_L: Tensor | None = None,
        *,
        vocabulary: Vocabulary = UNSHARDED_VOCABULARY,
    ) -> HiddenRows:
        """Return the rows of hidden states (..., H) before a linear head; all tensors have the same dtype."""
        tensors = (weight_LH,) if bias_L is None else (weight_LH, bias_L)
        hidden_NH = hidden.reshape(-1, hidden.shape[-1]).contiguous()
        return cls(hidden_NH, tensors, Projection(lambda x, given: F.linear(x, *given), True, vocabulary))

    @classmethod
    def from_logits(cls, logits: Tensor, *, vocabulary: Vocabulary = UNSHARDED_VOCABULARY) -> HiddenRows:
        """Return the rows of existing logits, (..., L)."""
        # Do not use reshape(-1, ...): it cannot infer the number of rows if this rank has no entries.
        flat = logits.reshape(logits.shape[:-1].numel(), logits.shape[-1]).contiguous()
        return cls(flat, (), Projection(lambda x, given: x, False, vocabulary))


def compute_token_statistics(
    rows: HiddenRows, ids_NK: Tensor, names: Sequence[TokenStatistic], *, chunk_rows: int
) -> dict[str, Tensor]:
    """Compute token statistics, differentiable except for "is_top1". Collective if ranks shard the vocabulary.

    Args:
        rows: the hidden states and their projection.
        ids_NK: int64, K >= 0 ids for each row, `IGNORE_INDEX` for none. "is_top1" is about the first.
        names: the statistics to compute.
        chunk_rows: maximum number of rows that have logits at a time.

    Returns:
        By name: (N,), or (N, K) for "log_probs"; float32 or wider.
    """
    if not names:
        return {}
    if "log_probs" not in names:
        ids_NK = ids_NK[:, : int("is_top1" in names)]
    values = _ChunkedStatistics.apply(rows.projection, ids_NK, tuple(names), chunk_rows, rows.hidden_NH, *rows.tensors)
    return dict(zip(names, values, strict=True))


def compute_token_loss(
    rows: HiddenRows,
    targets_N: Tensor,
    num_tokens: Tensor,
    *,
    chunk_rows: int,
    pending_gradients: WeakSet[Any] | None = None,
) -> Tensor:
    """Sum the cross entropy of `targets_N` [nats] and divide it by `num_tokens`; scalar. See [Note: chunks of rows].

    `pending_gradients`: gradients of losses with the same weights, whose backward has not run; this loss adds its own.
    """
    factor = torch.ones((), dtype=_promote_to_float32(rows.hidden_NH.dtype), device=targets_N.device) / num_tokens
    inputs = (rows.hidden_NH, *rows.tensors)
    has_gradient = torch.is_grad_enabled() and any(each.requires_grad for each in inputs)
    if has_gradient and pending_gradients:
        (values,) = compute_token_statistics(rows, targets_N[:, None], ["log_probs"], chunk_rows=chunk_rows).values()
        return -values.sum() * factor
    needs = [has_gradient and each.requires_grad for each in inputs]
    loss: Tensor = _ChunkedLoss.apply(rows.projection, targets_N, factor, chunk_rows, needs, pending_gradients, *inputs)
    return loss


def _iter_chunks(rows: int, chunk_rows: int) -> Iterator[slice]:
    count = -(-rows // chunk_rows)
    bounds = [index * rows // count for index in range(count + 1)] if count else [0]
    return (slice(start, stop) for start, stop in pairwise(bounds))


def _promote_to_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class _LogitsChunk:
    """The logits of a chunk of rows, and their backward to rows and tensors."""

    def __init__(self, projection: Projection, rows_CH: Tensor, tensors: Sequence[Tensor], needs: Sequence[bool]):
        self.projection, self.needs_grad = projection, needs
        self._linear, self._tensors = projection.is_linear, tensors
        records = not self._linear and any(needs)
        self._rows_CH = rows_CH.detach().requires_grad_() if records and needs[0] else rows_CH
        with torch.set_grad_enabled(records):
            self._logits_CL = projection.compute_logits(self._rows_CH, tensors)

    @property
    def dtype(self) -> torch.dtype:
        return self._logits_CL.dtype

    def take_logits(self) -> Tensor:
        """Return the logits in memory that may be overwritten. Call it once."""
        # Copy if not linear: autograd may have saved the logits, or they may be the input itself.
        owned = self._logits_CL.detach().to(_promote_to_float32(self.dtype), copy=not self._linear)
        if self._linear:
            self._logits_CL = self._logits_CL.new_empty(0)
        return owned

    def add_gradients(self, gradient_CL: Tensor, part: slice, sums: ChunkGradients) -> None:
        """Backpropagate a gradient of the logits, and add the result to the gradients of rows and tensors."""
        if not self._linear:
            inputs = [self._rows_CH, *self._tensors]
            indices = [index for index, needed in enumerate(self.needs_grad) if needed]
            wanted = [inputs[index] for index in indices]
            gradients = torch.autograd.grad(self._logits_CL, wanted, gradient_CL, allow_unused=True)
            for index, gradient in zip(indices, gradients, strict=True):
                sums.add(index, gradient, part)
            return
        if self.needs_grad[0] and sums.hidden_NH is not None:
            torch.mm(gradient_CL, self._tensors[0], out=sums.hidden_NH[part])
        if self.needs_grad[1]:
            sums.add_product(gradient_CL.t(), self._rows_CH)
        if len(self.needs_grad) > 2 and self.needs_grad[2]:
            sums.add(2, gradient_CL.sum(0), part)


class ChunkGradients:
    """Gradients of hidden states and tensors, accumulated over chunks."""

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
    def gradients(self) -> list[Tensor | None]:
        return [self.hidden_NH, *self._tensors]


class _ChunkedLoss(torch.autograd.Function):
    """See `compute_token_loss`; gradients are computed in forward."""

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
        sums, total, vocabulary = ChunkGradients(hidden_NH, needs), factor.new_zeros(()), projection.vocabulary
        for part in _iter_chunks(hidden_NH.shape[0], chunk_rows):
            chunk = _LogitsChunk(projection, hidden_NH[part], tensors, needs)
            targets_C1 = targets_N[part, None]
            measures, exponentials = compute_row_statistics(chunk.take_logits(), targets_C1, vocabulary, ["log_probs"])
            if any(needs):
                weights: dict[TokenStatistic, Tensor] = {"log_probs": -factor.expand(targets_C1.shape)}
                chunk.add_gradients(
                    exponentials.compute_gradient(measures, targets_C1, vocabulary, weights, chunk.dtype), part, sums
                )
            total -= measures.get_statistic("log_probs", targets_C1).sum()
            # Free the logits before the next chunk computes its own.
            del chunk, exponentials
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
                "the backward of a token loss was run twice; its gradients are made once. Compute it again."
            )
        return (None,) * 6 + tuple(None if each is None else each.mul_(grad) for each in sums.gradients)


class _ChunkedStatistics(torch.autograd.Function):
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
        statistics, saved = [], []
        for part in _iter_chunks(hidden_NH.shape[0], chunk_rows):
            chunk = _LogitsChunk(projection, hidden_NH[part], tensors, [False] * (1 + len(tensors)))
            measures, _ = compute_row_statistics(chunk.take_logits(), ids_NK[part], projection.vocabulary, names)
            del chunk, _
            statistics.append([measures.get_statistic(name, ids_NK[part]) for name in names])
            expected_C = measures.logsumexp if measures.expected_logit is None else measures.expected_logit
            saved.append(torch.stack([measures.logsumexp, expected_C]))
        ctx.projection, ctx.names, ctx.chunk_rows = projection, names, chunk_rows
        ctx.save_for_backward(ids_NK, torch.cat(saved, 1), hidden_NH, *tensors)
        values = tuple(torch.cat(parts) for parts in zip(*statistics, strict=True))
        ctx.mark_non_differentiable(*(each for each in values if not each.is_floating_point()))
        ctx.set_materialize_grads(False)
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        ids_NK, saved, hidden_NH, *tensors = ctx.saved_tensors
        needs = ctx.needs_input_grad[4:]
        vocabulary, sums = ctx.projection.vocabulary, ChunkGradients(hidden_NH, needs)
        grads_by_name = {name: grad for name, grad in zip(ctx.names, grads, strict=True) if grad is not None}
        for part in _iter_chunks(hidden_NH.shape[0], ctx.chunk_rows):
            chunk = _LogitsChunk(ctx.projection, hidden_NH[part], tensors, needs)
            # Use the values exchanged in forward; the gradient does not need the logits of the ids.
            measures = RowStatistics(saved[0, part], saved[0, part], saved[0, part, None], saved[1, part])
            weights = {name: grad[part] for name, grad in grads_by_name.items()}
            exponentials = ShiftedExponentials(chunk.take_logits())
            chunk.add_gradients(
                exponentials.compute_gradient(measures, ids_NK[part], vocabulary, weights, chunk.dtype), part, sums
            )
            del chunk, exponentials
        return (None,) * 4 + tuple(sums.gradients)

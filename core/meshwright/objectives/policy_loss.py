"""The arithmetic of `policy.GRPO` for one microbatch.

A factor per sequence, such as a ratio by sequence, is applied to sums over sequences: -sum_t min(r A_t, c A_t) equals
-(min(r, c) sum_t A_t+ + max(r, c) sum_t A_t-), with the positive and negative advantages A+ and A-. So rows and packed
documents are treated alike.

Shapes: B rows of a microbatch, S positions of each, D sequences: rows, or the documents in them.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .functions import at_targets

if TYPE_CHECKING:
    from ..step.tokens import Tokens
    from .base import Columns, Sums
    from .policy import GRPO


class PolicyLoss:
    """One microbatch of an objective; every part is summed over each sequence."""

    def __init__(self, options: GRPO, tokens: Tokens, batch: Columns) -> None:
        self.options, self._tokens, self._batch = options, tokens, batch
        self._log_probs_BS = tokens.log_probs
        self._advantages_BS = self._column("advantages")

    def result(self) -> tuple[Tensor, Sums]:
        """Return the sum, scalar, and further sums."""
        options, dtype = self.options, self._log_probs_BS.dtype
        loss_D, (low, high) = self._surrogate()
        clipped = {"low_mean": low, "high_mean": high, "region_mean": low | high}
        each_D = {f"clip_ratio/{name}": self._of_each(value.to(dtype)) for name, value in clipped.items()}
        if options.beta:
            difference_BS = self._column("reference_log_probs") - self._log_probs_BS
            each_D["kl"] = self._sum(difference_BS.exp() - difference_BS - 1)
            loss_D = loss_D + options.beta * each_D["kl"]
        if options.entropy or options.log_entropy:
            each_D["entropy"] = self._sum(self._tokens.entropy.where(self._tokens.mask, 0.0))
            loss_D = loss_D - options.entropy * each_D["entropy"] if options.entropy else loss_D
        means = options.normalize != "tokens"
        sums = {name: (value / self._lengths_D if means else value).sum().detach() for name, value in each_D.items()}
        divisor = {"tokens": 1, "sequence": self._lengths_D, "constant": options.max_tokens}[options.normalize]
        return (loss_D / divisor).sum(), sums

    def _surrogate(self) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The first term, (D,); and what is clipped below and above, bool, (B, S), or (D,) for ratios by sequence."""
        options = self.options
        old_BS = self._column("old_log_probs") if "old_log_probs" in self._batch else self._log_probs_BS.detach()
        log_ratio_BS, token_weight_BS, weight_D = self._log_probs_BS - old_BS, None, None
        if options.correction:
            weight = self._correction(old_BS)
            token_weight_BS, weight_D = (weight, None) if options.correction.startswith("token") else (None, weight)
        advantages_BS = self._advantages_BS if token_weight_BS is None else self._advantages_BS * token_weight_BS
        if options.importance == "token":
            ratio = log_ratio_BS.exp()
            once_BS, clipped_BS = self._clips(ratio)
            surrogate_D = -self._sum(torch.minimum(once_BS * advantages_BS, clipped_BS * advantages_BS))
            gains, losses = self._advantages_BS > 0, self._advantages_BS < 0
        else:
            ratio = (self._sum(log_ratio_BS) / self._lengths_D).exp()
            once_D, clipped_D = self._clips(ratio)
            up_D, down_D = self._sum(advantages_BS.clamp(min=0)), self._sum(advantages_BS.clamp(max=0))
            surrogate_D = -(torch.minimum(once_D, clipped_D) * up_D + torch.maximum(once_D, clipped_D) * down_D)
            # The sign of the sequence's total advantage: its tokens usually share one.
            mean_D = self._sum(self._advantages_BS)
            gains, losses = mean_D > 0, mean_D < 0
        surrogate_D = surrogate_D if weight_D is None else surrogate_D * weight_D
        low, high = ratio < 1 - options.clip_low, ratio > 1 + options.clip_high
        return surrogate_D, (low & losses, high & gains)

    def _clips(self, ratio: Tensor) -> tuple[Tensor, Tensor]:
        options = self.options
        once = ratio if options.delta is None else ratio.clamp(max=options.delta)
        return once, ratio.clamp(1 - options.clip_low, 1 + options.clip_high)

    def _correction(self, old_BS: Tensor) -> Tensor:
        """Importance weights of another engine's rollouts: (B, S) by token, (D,) by sequence; no gradient."""
        kind = self.options.correction or ""
        difference = (old_BS - self._column("sampling_log_probs")).nan_to_num(nan=0.0).detach()
        factor = (self._sum(difference) if kind.startswith("sequence") else difference).exp()
        low, high = self.options.correction_min, self.options.correction_max
        bounded = factor if low is None and high is None else factor.clamp(low, high)
        return bounded if kind.endswith("truncate") else factor.where(bounded == factor, 0.0)

    def _column(self, name: str) -> Tensor:
        return at_targets(self._tokens, self._batch[name], self._log_probs_BS)

    def _sum(self, values_BS: Tensor) -> Tensor:
        return self._tokens.document_sum(values_BS) if self.options.packed else self._tokens.sequence_sum(values_BS)

    def _of_each(self, values: Tensor) -> Tensor:
        """Sum values by token, or by sequence, over each sequence's tokens, (D,)."""
        return self._sum(values) if self.options.importance == "token" else values * self._lengths_D

    @cached_property
    def _lengths_D(self) -> Tensor:
        """Targets of each sequence, at least 1."""
        return self._sum(self._tokens.mask.to(self._log_probs_BS.dtype)).clamp(min=1)

"""Types of batches, objectives and optimizer factories. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

Batch: TypeAlias = "Mapping[str, Tensor]"
"""`input_ids` and `labels`, int64, (B, S); labels of -100 are masked. Other tensors go to the model's forward."""

IGNORE_INDEX = -100
"""The label of a masked token, which the loss ignores."""

Objective: TypeAlias = "Callable[[Any, Mapping[str, Tensor]], Tensor | tuple[Tensor, Mapping[str, Tensor]]]"
"""An objective that replaces the token loss; see [Note: objectives] in `meshwright.step.objective`."""

TokenStatistic: TypeAlias = Literal["log_probs", "logsumexp", "entropy", "mean_logit", "is_top1"]
"""A statistic of one row of logits: the log-probability of each id, the log-sum-exp, the entropy of the distribution
(all [nats]), the mean logit, and whether no logit is higher than that of the first id."""

OptimizerFactory: TypeAlias = "Callable[[Iterable[tuple[str, nn.Parameter]]], Optimizer]"
"""Builds an optimizer from (fully qualified name, parameter) pairs; see `meshwright.optim.build.optimizer_factory`."""

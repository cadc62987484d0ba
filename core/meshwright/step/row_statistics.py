"""Statistics of rows of logits over a vocabulary that ranks may shard, and their gradients.

[Note: statistics of rows] All follow from four sums over the vocabulary, which ranks that shard it exchange in one
message. With p = softmax(l): d logsumexp / dl = p, d log_prob / dl = onehot - p, d entropy / dl = -p (l - E[l]), and
d mean_logit / dl = 1 / V. So no graph is recorded, and the exponentials reuse the memory of the logits.

Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3, for the cross entropy of a sharded vocabulary.

Shapes: C rows of a chunk; K ids of each row; V entries of the vocabulary, L of them on this rank; R ranks that shard
the vocabulary; M sums of a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..base.types import IGNORE_INDEX, TokenStatistic


class Vocabulary:
    """How the vocabulary is sharded over ranks; this base class: not at all. `start`: first entry of this rank."""

    start: int = 0

    def full_size(self, local_size: int) -> int:
        """Return the size of the full vocabulary from that of this rank."""
        return local_size

    def gather_stacked(self, local: Tensor) -> Tensor:
        """Stack the tensors of the ranks that shard the vocabulary along a new dim 0, without autograd. Collective."""
        return local[None]

    def gather_logits(self, logits: Tensor) -> Tensor:
        """Gather the full logits, without autograd. Collective."""
        return logits


UNSHARDED_VOCABULARY = Vocabulary()


@dataclass(frozen=True)
class RowStatistics:
    """Statistics of each row over the full vocabulary: (C,), or (C, K) for `selected_logits`; float32 or float64."""

    logsumexp: Tensor
    max_logit: Tensor
    selected_logits: Tensor
    expected_logit: Tensor | None = None
    mean_logit: Tensor | None = None

    def get_statistic(self, name: TokenStatistic, ids_CK: Tensor) -> Tensor:
        """Return one statistic: (C,), or (C, K) for "log_probs", which are 0 where there is no id."""
        has_id_CK = ids_CK != IGNORE_INDEX
        if name == "log_probs":
            return torch.where(has_id_CK, self.selected_logits - self.logsumexp[:, None], 0.0)
        if name == "is_top1":
            return (has_id_CK & (self.selected_logits == self.max_logit[:, None]))[:, :1].any(-1)
        value = {"logsumexp": self.logsumexp, "mean_logit": self.mean_logit}.get(name)
        if name == "entropy" and self.expected_logit is not None:
            value = self.logsumexp - self.expected_logit
        if value is None:
            raise ValueError(f"{name} was not measured")
        return value


class ShiftedExponentials:
    """exp(logit - the row's maximum on this rank), computed in place of the logits (float32 or wider)."""

    def __init__(self, logits_CL: Tensor) -> None:
        # A rank may have no entries, and all logits of a row may be -inf.
        low = torch.finfo(logits_CL.dtype).min
        rows, entries = logits_CL.shape
        self.max_C = logits_CL.amax(-1).clamp_(min=low) if entries else logits_CL.new_full((rows,), low)
        self.values_CL = logits_CL.sub_(self.max_C[:, None]).exp_()

    def sum_weighted_logits(self) -> Tensor:
        """Return the sum of exponential x logit of each row, (C,)."""
        # entr(e) is -e log(e), and 0 at 0.
        return self.max_C * self.values_CL.sum(-1) - torch.special.entr(self.values_CL).sum(-1)

    def compute_gradient(
        self,
        measures: RowStatistics,
        ids_CK: Tensor,
        vocabulary: Vocabulary,
        weights: Mapping[TokenStatistic, Tensor],
        dtype: torch.dtype,
    ) -> Tensor:
        """Return the gradient of the sum of weight x statistic over the logits, (C, L), rounded once to `dtype`.

        Overwrites the exponentials.
        """
        values_CL, none_C = self.values_CL, torch.zeros_like(self.max_C)
        factor_C = (self.max_C - measures.logsumexp).exp_()
        if "log_probs" not in weights:
            ids_CK = ids_CK[:, :0]
        chosen_CK = torch.where(ids_CK != IGNORE_INDEX, weights.get("log_probs", none_C[:, None]), 0.0)
        by_value_C = (weights.get("logsumexp", none_C) - chosen_CK.sum(-1)) * factor_C
        more_CL = None
        if "entropy" in weights and measures.expected_logit is not None:
            by_entropy_C = weights["entropy"] * factor_C
            by_value_C = by_value_C - by_entropy_C * (self.max_C - measures.expected_logit)
            more_CL = torch.special.entr(values_CL).mul_(by_entropy_C[:, None])
        if "mean_logit" in weights:
            mean_C = weights["mean_logit"] / vocabulary.full_size(values_CL.shape[1])
            more_CL = mean_C[:, None] if more_CL is None else more_CL.add_(mean_C[:, None])
        here_CK, local_CK = _find_local_ids(ids_CK, vocabulary, values_CL.shape[1])
        found_CL = values_CL if dtype == values_CL.dtype else torch.empty_like(values_CL, dtype=dtype)
        if more_CL is not None:
            torch.add(values_CL.mul_(by_value_C[:, None]), more_CL, out=values_CL)
            by_value_C = torch.ones_like(by_value_C)
        if not values_CL.shape[1]:
            return found_CL
        chosen_CK = torch.where(here_CK, chosen_CK, 0.0)
        # Subtract 1 from p before rounding: if p is close to 1, rounding first would cancel the difference.
        if chosen_CK.shape[1] == 1:
            own_CK = values_CL.gather(1, local_CK) * by_value_C[:, None] + chosen_CK
            torch.mul(values_CL, by_value_C[:, None], out=found_CL)
            return found_CL.scatter_(1, local_CK, own_CK.to(dtype))
        values_CL.mul_(by_value_C[:, None]).scatter_add_(1, local_CK, chosen_CK)
        return found_CL if found_CL is values_CL else found_CL.copy_(values_CL)


def compute_row_statistics(
    logits_CL: Tensor, ids_CK: Tensor, vocabulary: Vocabulary, names: Sequence[TokenStatistic]
) -> tuple[RowStatistics, ShiftedExponentials]:
    """Compute statistics of a chunk of rows. Overwrites the logits, float32 or wider.

    Collective if ranks shard the vocabulary.
    """
    entries = logits_CL.shape[1]
    more = {"mean": logits_CL.sum(-1)} if "mean_logit" in names else {}
    chosen_CK = logits_CL.new_zeros(ids_CK.shape)
    if entries:
        here_CK, local_CK = _find_local_ids(ids_CK, vocabulary, entries)
        chosen_CK = torch.where(here_CK, logits_CL.gather(1, local_CK), 0.0)
    exponentials = ShiftedExponentials(logits_CL)
    if "entropy" in names:
        more["expected"] = exponentials.sum_weighted_logits()
    parts = {"highest": exponentials.max_C, "sum": exponentials.values_CL.sum(-1), **more}
    message = torch.cat([torch.stack([*parts.values()]), chosen_CK.t()])
    each_RMC = vocabulary.gather_stacked(message)
    each = dict(zip(parts, each_RMC.unbind(1), strict=False))
    highest_C = each["highest"].amax(0)
    scale_RC = (each["highest"] - highest_C).exp_()
    sum_C = (each["sum"] * scale_RC).sum(0)
    expected_C = (each["expected"] * scale_RC).sum(0) / sum_C if "expected" in each else None
    mean_C = each["mean"].sum(0) / vocabulary.full_size(entries) if "mean" in each else None
    chosen_CK = each_RMC[:, len(parts) :].sum(0).t()
    return RowStatistics(highest_C + sum_C.log(), highest_C, chosen_CK, expected_C, mean_C), exponentials


def _find_local_ids(ids_CK: Tensor, vocabulary: Vocabulary, entries: int) -> tuple[Tensor, Tensor]:
    """Return whether each id is one of this rank's entries, and its local index, or 0."""
    local_CK = ids_CK - vocabulary.start
    here_CK = (ids_CK != IGNORE_INDEX) & (local_CK >= 0) & (local_CK < entries)
    return here_CK, torch.where(here_CK, local_CK, 0)

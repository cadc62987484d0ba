"""Statistics of tokens and their gradients from logits, for one chunk of rows at a time.

All follow from four sums over the vocabulary, which ranks that share it exchange in one message. With p = softmax(l): d
logsumexp / dl = p, d log_prob / dl = onehot - p, d entropy / dl = -p (l - E[l]), and d mean_logit / dl = 1 / V. So no
graph is recorded, and the exponentials take the memory of the logits.

Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3, for the cross entropy of a divided vocabulary. Shapes: C rows
of a chunk, K ids of each; V entries of the vocabulary, L of them on this rank, R ranks that share them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..base.types import IGNORED_LABEL, TokenStatistic


class Vocabulary:
    """How the entries of logits are divided over ranks: not at all here. `start` is the first entry of this rank."""

    start: int = 0

    def size(self, local: int) -> int:
        """Return the number of all entries, given that of this rank."""
        return local

    def each(self, local: Tensor) -> Tensor:
        """Stack the tensors of ranks that share the entries along a new first dim, without autograd. Collective."""
        return local[None]

    def gathered(self, logits: Tensor) -> Tensor:
        """Gather the logits of all entries; without autograd. Collective likewise."""
        return logits


WHOLE = Vocabulary()


@dataclass(frozen=True)
class Measures:
    """Of each row, over the whole vocabulary; (C,), but (C, K) for the logits `chosen` of ids; float32 or float64."""

    log_sum: Tensor
    highest: Tensor
    chosen: Tensor
    expected: Tensor | None = None
    mean: Tensor | None = None

    def values(self, name: TokenStatistic, ids_CK: Tensor) -> Tensor:
        """Return one statistic: (C, K) for "log_probs", 0 where there is no id, else (C,)."""
        has_id_CK = ids_CK != IGNORED_LABEL
        if name == "log_probs":
            return torch.where(has_id_CK, self.chosen - self.log_sum[:, None], 0.0)
        if name == "is_top1":
            return (has_id_CK & (self.chosen == self.highest[:, None]))[:, :1].any(-1)
        found = {"logsumexp": self.log_sum, "mean_logit": self.mean}.get(name)
        if name == "entropy" and self.expected is not None:
            found = self.log_sum - self.expected
        if found is None:
            raise ValueError(f"{name} was not measured")
        return found


class Exponentials:
    """exp(logit - the row's highest logit on this rank), in the memory of the logits (float32 or wider)."""

    def __init__(self, logits_CL: Tensor) -> None:
        # A rank may have no entry at all, and a row no logit above -inf.
        low = torch.finfo(logits_CL.dtype).min
        rows, entries = logits_CL.shape
        self.highest_C = logits_CL.amax(-1).clamp_(min=low) if entries else logits_CL.new_full((rows,), low)
        self.values_CL = logits_CL.sub_(self.highest_C[:, None]).exp_()

    def expected_sum(self) -> Tensor:
        """Return the sum of exponential x logit of each row, (C,)."""
        # entr(e) is -e log(e), and 0 at 0.
        return self.highest_C * self.values_CL.sum(-1) - torch.special.entr(self.values_CL).sum(-1)

    def gradient(
        self,
        measures: Measures,
        ids_CK: Tensor,
        vocabulary: Vocabulary,
        weights: Mapping[TokenStatistic, Tensor],
        dtype: torch.dtype,
    ) -> Tensor:
        """Return the gradient of the sum of weight x statistic over the logits, (C, L), rounded once to `dtype`.

        It takes the memory of the exponentials, which are lost, if that has this dtype.
        """
        values_CL, none_C = self.values_CL, torch.zeros_like(self.highest_C)
        factor_C = (self.highest_C - measures.log_sum).exp_()
        if "log_probs" not in weights:
            ids_CK = ids_CK[:, :0]
        chosen_CK = torch.where(ids_CK != IGNORED_LABEL, weights.get("log_probs", none_C[:, None]), 0.0)
        by_value_C = (weights.get("logsumexp", none_C) - chosen_CK.sum(-1)) * factor_C
        more_CL = None
        if "entropy" in weights and measures.expected is not None:
            by_entropy_C = weights["entropy"] * factor_C
            by_value_C = by_value_C - by_entropy_C * (self.highest_C - measures.expected)
            more_CL = torch.special.entr(values_CL).mul_(by_entropy_C[:, None])
        if "mean_logit" in weights:
            mean_C = weights["mean_logit"] / vocabulary.size(values_CL.shape[1])
            more_CL = mean_C[:, None] if more_CL is None else more_CL.add_(mean_C[:, None])
        here_CK, local_CK = _local(ids_CK, vocabulary, values_CL.shape[1])
        found_CL = values_CL if dtype == values_CL.dtype else torch.empty_like(values_CL, dtype=dtype)
        if more_CL is not None:
            torch.add(values_CL.mul_(by_value_C[:, None]), more_CL, out=values_CL)
            by_value_C = torch.ones_like(by_value_C)
        if not values_CL.shape[1]:
            return found_CL
        chosen_CK = torch.where(here_CK, chosen_CK, 0.0)
        # p - 1 before it is rounded: where p is almost 1, nothing would be left of the difference.
        if chosen_CK.shape[1] == 1:
            own_CK = values_CL.gather(1, local_CK) * by_value_C[:, None] + chosen_CK
            torch.mul(values_CL, by_value_C[:, None], out=found_CL)
            return found_CL.scatter_(1, local_CK, own_CK.to(dtype))
        values_CL.mul_(by_value_C[:, None]).scatter_add_(1, local_CK, chosen_CK)
        return found_CL if found_CL is values_CL else found_CL.copy_(values_CL)


def measure(
    logits_CL: Tensor, ids_CK: Tensor, vocabulary: Vocabulary, names: Sequence[TokenStatistic]
) -> tuple[Measures, Exponentials]:
    """Measure a chunk of rows; overwrites the logits, float32 or wider. Collective if ranks share the vocabulary."""
    entries = logits_CL.shape[1]
    more = {"mean": logits_CL.sum(-1)} if "mean_logit" in names else {}
    chosen_CK = logits_CL.new_zeros(ids_CK.shape)
    if entries:
        here_CK, local_CK = _local(ids_CK, vocabulary, entries)
        chosen_CK = torch.where(here_CK, logits_CL.gather(1, local_CK), 0.0)
    exponentials = Exponentials(logits_CL)
    if "entropy" in names:
        more["expected"] = exponentials.expected_sum()
    parts = {"highest": exponentials.highest_C, "sum": exponentials.values_CL.sum(-1), **more}
    message = torch.cat([torch.stack([*parts.values()]), chosen_CK.t()])
    each_RMC = vocabulary.each(message)
    each = dict(zip(parts, each_RMC.unbind(1), strict=False))
    highest_C = each["highest"].amax(0)
    scale_RC = (each["highest"] - highest_C).exp_()
    sum_C = (each["sum"] * scale_RC).sum(0)
    expected_C = (each["expected"] * scale_RC).sum(0) / sum_C if "expected" in each else None
    mean_C = each["mean"].sum(0) / vocabulary.size(entries) if "mean" in each else None
    chosen_CK = each_RMC[:, len(parts) :].sum(0).t()
    return Measures(highest_C + sum_C.log(), highest_C, chosen_CK, expected_C, mean_C), exponentials


def _local(ids_CK: Tensor, vocabulary: Vocabulary, entries: int) -> tuple[Tensor, Tensor]:
    """Return whether each id is one of this rank's entries, and its index here, or 0."""
    local_CK = ids_CK - vocabulary.start
    here_CK = (ids_CK != IGNORED_LABEL) & (local_CK >= 0) & (local_CK < entries)
    return here_CK, torch.where(here_CK, local_CK, 0)

"""Arithmetic that several objectives share.

Shapes: B rows of a microbatch, S positions of each, P pairs of rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from ..step.token_loss import targets
from ..step.tokens import Sequences, Tokens
from ..strategy.contract import IGNORED_LABEL

ABSENT = -1e30
"""The log-probability of what is not there: its exponential is 0, and no difference of two is NaN."""


def log_sigmoid(value: Tensor) -> Tensor:
    """log(1 / (1 + exp(-value)))."""
    return F.logsigmoid(value)


def log1mexp(value: Tensor) -> Tensor:
    """log(1 - exp(value)) for negative values, without loss of digits near 0 and far from it.

    Source: Maechler 2012, "Accurately computing log(1 - exp(-|a|))".
    """
    small = value > -0.6931471805599453
    # Each branch is kept from where its gradient would be infinite, and a NaN times 0.
    near = (-torch.expm1(value.where(small, torch.full_like(value, -1.0)))).log()
    far = torch.log1p(-value.where(~small, torch.full_like(value, -1.0)).exp())
    return torch.where(small, near, far)


def at_targets(tokens: Sequences, values: Tensor, like: Tensor) -> Tensor:
    """A column (B,) or (B, S) at the positions that predict a label, 0 elsewhere, in the dtype of `like`; (B, S)."""
    whole_BS = values[:, None].expand(tokens.mask.shape) if values.dim() == 1 else values
    return torch.where(tokens.mask, whole_BS.to(like.dtype), 0.0)


def sequence_log_probs(tokens: Tokens, values: Tensor | None = None) -> Tensor:
    """The sum of log-probabilities over each row, (B,): the model's own, or those of a column (B, S), or (B,) as it is.

    A row without targets gives 0.
    """
    own_BS = tokens.log_probs
    if values is None:
        return tokens.sequence_sum(own_BS)
    if values.dim() == 1:
        return torch.where(tokens.mask.any(1), values.to(own_BS.dtype), 0.0)
    return tokens.sequence_sum(at_targets(tokens, values, own_BS))


def lengths(tokens: Sequences) -> Tensor:
    """Targets of each row, at least 1, int64, (B,)."""
    return tokens.sequence_sum(tokens.mask).clamp(min=1)


def pairs(values_B: Tensor) -> tuple[Tensor, Tensor]:
    """Of rows of which 2i is chosen and 2i + 1 rejected: both, each (P,)."""
    chosen_P, rejected_P = values_B.unflatten(0, (-1, 2)).unbind(1)
    return chosen_P, rejected_P


def kept_pairs(tokens: Sequences) -> Tensor:
    """Which pairs count: those with any target, bool, (P,)."""
    chosen_P, rejected_P = pairs(tokens.mask.any(1))
    return chosen_P | rejected_P


def reward_sums(chosen_P: Tensor, rejected_P: Tensor, kept_P: Tensor) -> dict[str, Tensor]:
    """Sums over pairs, under trl's names, without gradients.

    Args:
        chosen_P, rejected_P: rewards.
        kept_P: which pairs count.
    """
    chosen_P, rejected_P = chosen_P.detach(), rejected_P.detach()
    each = {
        "rewards/chosen": chosen_P,
        "rewards/rejected": rejected_P,
        "rewards/margins": chosen_P - rejected_P,
        "rewards/accuracies": (chosen_P > rejected_P).to(chosen_P.dtype),
    }
    return total(each, kept_P)


def total(each: Mapping[str, Tensor], kept: Tensor) -> dict[str, Tensor]:
    """The sum of each over what is kept, without gradients."""
    return {name: value.detach().where(kept, 0.0).sum() for name, value in each.items()}


def absent(ids_BSK: Tensor, kept_BS: Tensor) -> tuple[Tensor, Tensor]:
    """Ids without those of positions that do not count, and which of them there are, bool; both (B, S, K)."""
    ids_BSK = ids_BSK.where(kept_BS[..., None], IGNORED_LABEL)
    return ids_BSK, ids_BSK != IGNORED_LABEL


def with_rest(log_probs_BSK: Tensor) -> Tensor:
    """Log-probabilities, and that of all entries which are not among them, of at least 1e-7; (B, S, K + 1)."""
    known_BS1 = log_probs_BSK.logsumexp(-1, keepdim=True).clamp(max=-1e-7)
    return torch.cat([log_probs_BSK, log1mexp(known_BS1)], -1)


def divergence(student_BSK: Tensor, teacher_BSK: Tensor, beta: float) -> Tensor:
    """Generalised Jensen-Shannon divergence of distributions given by their logarithms [nats], (B, S).

    Args:
        beta: 0 for KL(teacher || student), 1 for KL(student || teacher).
    """
    if beta == 0:
        return _kl(teacher_BSK, student_BSK)
    if beta == 1:
        return _kl(student_BSK, teacher_BSK)
    mixture_BSK = torch.logaddexp(student_BSK + math.log1p(-beta), teacher_BSK + math.log(beta))
    return beta * _kl(teacher_BSK, mixture_BSK) + (1 - beta) * _kl(student_BSK, mixture_BSK)


def _kl(of_BSK: Tensor, to_BSK: Tensor) -> Tensor:
    return (of_BSK.exp() * (of_BSK - to_BSK)).sum(-1)


def previous_tokens(input_ids: Tensor, count: int, *, position_ids: Tensor | None = None) -> Tensor:
    """Candidates of token-level unlikelihood: the tokens that stand before a target, without the target itself.

    Args:
        input_ids: int64, (B, S).
        count: how many different ones at most, the latest.
        position_ids: int64, (B, S) or (1, S), where several documents share a row; a document has its own tokens alone.

    Returns:
        int64, (B, S, count), the latest first, -100 where there are no more; all of the last position, which predicts
        nothing.

    Source: Welleck et al. 2020, arXiv:1908.04319, section 5.1, who take all of them.
    """
    places_S = torch.arange(input_ids.shape[1], device=input_ids.device)
    begins_BS = torch.zeros_like(input_ids)
    if position_ids is not None:
        begins_BS[:, 1:] = (position_ids.diff(dim=1) <= 0).long()
    documents_BS = begins_BS.cumsum(1)
    found = []
    for ids_S, document_S in zip(input_ids, documents_BS, strict=True):
        # A token is named once, at its latest place before the target.
        same_SS = (ids_S[:, None] == ids_S) & (document_S[:, None] == document_S)
        later_SS = same_SS & (places_S[:, None] < places_S)
        next_S = torch.where(later_SS, places_S, len(places_S)).amin(1)
        before_SS = (places_S <= places_S[:, None]) & (next_S > places_S[:, None])
        before_SS &= document_S == document_S[:, None]
        before_SS[:-1] &= ids_S != ids_S[1:, None]
        before_SS[-1] = False
        latest_SK = torch.where(before_SS, places_S, -1).topk(min(count, len(places_S)), dim=1).values
        ids_SK = torch.where(latest_SK >= 0, ids_S[latest_SK.clamp(min=0)], IGNORED_LABEL)
        found.append(F.pad(ids_SK, (0, count - ids_SK.shape[1]), value=IGNORED_LABEL))
    return torch.stack(found)


def documents_with_targets(batch: Mapping[str, Tensor]) -> int:
    """How many documents of a whole microbatch have a target; where rows hold several, it has `position_ids`."""
    sequences = Sequences(targets(batch["labels"]), batch.get("position_ids"))
    return int((sequences.document_sum(sequences.mask) > 0).sum())


def wide(values: Tensor) -> Tensor:
    """In float32, or float64 as they are."""
    return values.to(torch.promote_types(values.dtype, torch.float32))

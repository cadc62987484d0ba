"""Functions that several objectives share.

Shapes: B rows of a microbatch, S positions per row, K entries per position, P pairs of rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional as F

from meshwright.plugin import IGNORE_INDEX, ModelError, Sequences, Tokens, shift_labels

MASKED_LOG_PROB = -1e30
"""Log-probability of a missing entry. Its exponential is 0, and differences are not NaN."""


log_sigmoid = F.logsigmoid


def log1mexp(value: Tensor) -> Tensor:
    """Return log(1 - exp(value)) for negative values, accurate near 0 and far from it.

    Source: Maechler 2012, "Accurately computing log(1 - exp(-|a|))".
    """
    small = value > -0.6931471805599453
    # Evaluate no branch where its gradient is infinite: 0 times infinity is NaN.
    near = (-torch.expm1(value.where(small, torch.full_like(value, -1.0)))).log()
    far = torch.log1p(-value.where(~small, torch.full_like(value, -1.0)).exp())
    return torch.where(small, near, far)


def mask_to_targets(tokens: Sequences, values: Tensor, like: Tensor) -> Tensor:
    """Return a column (B,) or (B, S) as (B, S) in the dtype of `like`, with 0 where no label is predicted."""
    expanded_BS = values[:, None].expand(tokens.mask.shape) if values.dim() == 1 else values
    return torch.where(tokens.mask, expanded_BS.to(like.dtype), 0.0)


def sequence_log_probs(tokens: Tokens, values: Tensor | None = None) -> Tensor:
    """Sum the model's log-probabilities, or a column (B, S), over each row, (B,). A column (B,) holds such sums."""
    own_BS = tokens.log_probs
    if values is None:
        return tokens.sum_by_sequence(own_BS)
    if values.dim() == 1:
        return torch.where(tokens.mask.any(1), values.to(own_BS.dtype), 0.0)
    return tokens.sum_by_sequence(mask_to_targets(tokens, values, own_BS))


def count_targets(tokens: Sequences) -> Tensor:
    """Return the number of targets of each row, at least 1, int64, (B,)."""
    return tokens.sum_by_sequence(tokens.mask).clamp(min=1)


def split_pairs(values_B: Tensor) -> tuple[Tensor, Tensor]:
    """Split rows into chosen (2i) and rejected (2i + 1) ones, each (P,)."""
    chosen_P, rejected_P = values_B.unflatten(0, (-1, 2)).unbind(1)
    return chosen_P, rejected_P


def find_valid_pairs(tokens: Sequences) -> Tensor:
    """Return a mask of the pairs that have a target, bool, (P,)."""
    chosen_P, rejected_P = split_pairs(tokens.mask.any(1))
    return chosen_P | rejected_P


def sum_rewards(chosen_P: Tensor, rejected_P: Tensor, valid_P: Tensor) -> dict[str, Tensor]:
    """Sum rewards, margins and accuracies over valid pairs, without gradients. Names are those of trl."""
    chosen_P, rejected_P = chosen_P.detach(), rejected_P.detach()
    each = {
        "rewards/chosen": chosen_P,
        "rewards/rejected": rejected_P,
        "rewards/margins": chosen_P - rejected_P,
        "rewards/accuracies": (chosen_P > rejected_P).to(chosen_P.dtype),
    }
    return masked_sums(each, valid_P)


def masked_sums(values: Mapping[str, Tensor], mask: Tensor) -> dict[str, Tensor]:
    """Sum each value over a mask, without gradients."""
    return {name: value.detach().where(mask, 0.0).sum() for name, value in values.items()}


def mask_ids(ids_BSK: Tensor, mask_BS: Tensor) -> tuple[Tensor, Tensor]:
    """Replace ids at masked positions by -100; return the ids and a mask of those that remain, both (B, S, K)."""
    ids_BSK = ids_BSK.where(mask_BS[..., None], IGNORE_INDEX)
    return ids_BSK, ids_BSK != IGNORE_INDEX


def append_tail(log_probs_BSK: Tensor) -> Tensor:
    """Append the log-probability of all other entries together, at least log(1e-7); (B, S, K + 1)."""
    known_BS1 = log_probs_BSK.logsumexp(-1, keepdim=True).clamp(max=-1e-7)
    return torch.cat([log_probs_BSK, log1mexp(known_BS1)], -1)


def generalized_jsd(student_BSK: Tensor, teacher_BSK: Tensor, beta: float) -> Tensor:
    """Return the generalized Jensen-Shannon divergence of two distributions of log-probabilities [nats], (B, S).

    `beta` 0 is KL(teacher || student), 1 is KL(student || teacher).
    """
    if beta == 0:
        return _kl(teacher_BSK, student_BSK)
    if beta == 1:
        return _kl(student_BSK, teacher_BSK)
    mixture_BSK = torch.logaddexp(student_BSK + math.log1p(-beta), teacher_BSK + math.log(beta))
    return beta * _kl(teacher_BSK, mixture_BSK) + (1 - beta) * _kl(student_BSK, mixture_BSK)


def _kl(p_BSK: Tensor, q_BSK: Tensor) -> Tensor:
    return (p_BSK.exp() * (p_BSK - q_BSK)).sum(-1)


def previous_tokens(input_ids: Tensor, count: int, *, position_ids: Tensor | None = None) -> Tensor:
    """Return the candidates of token-level unlikelihood: tokens that precede a target, except the target itself.

    Args:
        input_ids: int64, (B, S).
        count: maximum number of distinct tokens per position; the latest are taken.
        position_ids: int64, (B, S) or (1, S), for packed rows; candidates are from the same document.

    Returns:
        int64, (B, S, count), latest first, padded with -100. The last position has only -100.

    Source: Welleck et al. 2020, arXiv:1908.04319, section 5.1, which takes all preceding tokens.
    """
    places_S = torch.arange(input_ids.shape[1], device=input_ids.device)
    begins_BS = torch.zeros_like(input_ids)
    if position_ids is not None:
        begins_BS[:, 1:] = (position_ids.diff(dim=1) <= 0).long()
    documents_BS = begins_BS.cumsum(1)
    found = []
    for ids_S, document_S in zip(input_ids, documents_BS, strict=True):
        # Count each token once, at its latest position before the target.
        same_SS = (ids_S[:, None] == ids_S) & (document_S[:, None] == document_S)
        later_SS = same_SS & (places_S[:, None] < places_S)
        next_S = torch.where(later_SS, places_S, len(places_S)).amin(1)
        before_SS = (places_S <= places_S[:, None]) & (next_S > places_S[:, None])
        before_SS &= document_S == document_S[:, None]
        before_SS[:-1] &= ids_S != ids_S[1:, None]
        before_SS[-1] = False
        latest_SK = torch.where(before_SS, places_S, -1).topk(min(count, len(places_S)), dim=1).values
        ids_SK = torch.where(latest_SK >= 0, ids_S[latest_SK.clamp(min=0)], IGNORE_INDEX)
        found.append(F.pad(ids_SK, (0, count - ids_SK.shape[1]), value=IGNORE_INDEX))
    return torch.stack(found)


def count_documents_with_targets(batch: Mapping[str, Tensor]) -> int:
    """Count the documents of a full microbatch that have a target; `position_ids` split rows into documents."""
    sequences = Sequences(shift_labels(batch["labels"]), batch.get("position_ids"))
    return int((sequences.sum_by_document(sequences.mask) > 0).sum())


def select_head_output(logits: Tensor, dims: int, name: str) -> Tensor:
    """Return the output of a head with one feature, without that dimension, in float32 or wider.

    Raises ModelError for other heads.
    """
    if logits.dim() != dims or logits.shape[-1] != 1:
        kind, shape = ("tokens", "(B, S, 1)") if dims == 3 else ("sequences", "(B, 1)")
        raise ModelError(
            f"objective {name!r} needs a head over {kind} with one feature, {shape}, but the model returns "
            f"{tuple(logits.shape)}. Set num_labels=1, and use a model that classifies {kind}."
        )
    values = logits[..., 0]
    return values.to(torch.promote_types(values.dtype, torch.float32))


# -- pair losses of `dpo`: arguments chosen (P,), rejected (P,), beta, label_smoothing; see `preference.DPO`

PairLoss = Callable[[Tensor, Tensor, float, float], Tensor]


def smoothed_preference_loss(margin_P: Tensor, label_smoothing: float) -> Tensor:
    """Return the binary cross entropy of the margin, with label smoothing."""
    loss_P = -(1 - label_smoothing) * log_sigmoid(margin_P)
    return loss_P - label_smoothing * log_sigmoid(-margin_P) if label_smoothing else loss_P


def _robust_loss(chosen_P: Tensor, rejected_P: Tensor, beta: float, label_smoothing: float) -> Tensor:
    margin_P = beta * (chosen_P - rejected_P)
    return (-(1 - label_smoothing) * log_sigmoid(margin_P) + label_smoothing * log_sigmoid(-margin_P)) / (
        1 - 2 * label_smoothing
    )


def _exo_loss(chosen_P: Tensor, rejected_P: Tensor, beta: float, label_smoothing: float) -> Tensor:
    margin_P = beta * (chosen_P - rejected_P)
    right_P = margin_P.sigmoid() * (log_sigmoid(margin_P) - math.log1p(-label_smoothing))
    return right_P + (-margin_P).sigmoid() * (log_sigmoid(-margin_P) - math.log(label_smoothing))


def _nca_loss(chosen_P: Tensor, rejected_P: Tensor, beta: float, label_smoothing: float) -> Tensor:
    chosen_P, rejected_P = beta * chosen_P, beta * rejected_P
    return -log_sigmoid(chosen_P) - 0.5 * log_sigmoid(-chosen_P) - 0.5 * log_sigmoid(-rejected_P)


PAIR_LOSSES: Mapping[str, PairLoss] = MappingProxyType(
    {
        "sigmoid": lambda c, r, beta, wrong: smoothed_preference_loss(beta * (c - r), wrong),
        "robust": _robust_loss,
        "hinge": lambda c, r, beta, wrong: (1 - beta * (c - r)).relu(),
        "ipo": lambda c, r, beta, wrong: (c - r - 1 / (2 * beta)) ** 2,
        "exo_pair": _exo_loss,
        "nca_pair": _nca_loss,
        "bco_pair": lambda c, r, beta, wrong: -log_sigmoid(beta * c) - log_sigmoid(-beta * r),
        "sppo_hard": lambda c, r, beta, wrong: (c - 0.5 / beta) ** 2 + (r + 0.5 / beta) ** 2,
        "apo_zero": lambda c, r, beta, wrong: 1 - (beta * c).sigmoid() + (beta * r).sigmoid(),
        "apo_down": lambda c, r, beta, wrong: (beta * c).sigmoid() + 1 - (beta * (c - r)).sigmoid(),
        "sigmoid_norm": lambda c, r, beta, wrong: -log_sigmoid(beta * (c - r)),
    }
)

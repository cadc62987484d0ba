"""What the losses of `dpo` make of a pair, each of (chosen, rejected, beta, label_smoothing), the first two (P,).

Chosen and rejected are sums over an answer of log p - log p_reference, or their means; see `preference.DPO`.
Shapes: P pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

from torch import Tensor

from .functions import log_sigmoid

PairLoss = Callable[[Tensor, Tensor, float, float], Tensor]


def smoothed(margin_P: Tensor, label_smoothing: float) -> Tensor:
    """Cross entropy of the margin's sigmoid where a label is wrong so often."""
    loss_P = -(1 - label_smoothing) * log_sigmoid(margin_P)
    return loss_P - label_smoothing * log_sigmoid(-margin_P) if label_smoothing else loss_P


def _robust(chosen_P: Tensor, rejected_P: Tensor, beta: float, wrong: float) -> Tensor:
    margin_P = beta * (chosen_P - rejected_P)
    return (-(1 - wrong) * log_sigmoid(margin_P) + wrong * log_sigmoid(-margin_P)) / (1 - 2 * wrong)


def _exo(chosen_P: Tensor, rejected_P: Tensor, beta: float, wrong: float) -> Tensor:
    margin_P = beta * (chosen_P - rejected_P)
    right_P = margin_P.sigmoid() * (log_sigmoid(margin_P) - math.log1p(-wrong))
    return right_P + (-margin_P).sigmoid() * (log_sigmoid(-margin_P) - math.log(wrong))


def _nca(chosen_P: Tensor, rejected_P: Tensor, beta: float, wrong: float) -> Tensor:
    chosen_P, rejected_P = beta * chosen_P, beta * rejected_P
    return -log_sigmoid(chosen_P) - 0.5 * log_sigmoid(-chosen_P) - 0.5 * log_sigmoid(-rejected_P)


PAIR_LOSSES: Mapping[str, PairLoss] = MappingProxyType(
    {
        "sigmoid": lambda c, r, beta, wrong: smoothed(beta * (c - r), wrong),
        "robust": _robust,
        "hinge": lambda c, r, beta, wrong: (1 - beta * (c - r)).relu(),
        "ipo": lambda c, r, beta, wrong: (c - r - 1 / (2 * beta)) ** 2,
        "exo_pair": _exo,
        "nca_pair": _nca,
        "bco_pair": lambda c, r, beta, wrong: -log_sigmoid(beta * c) - log_sigmoid(-beta * r),
        "sppo_hard": lambda c, r, beta, wrong: (c - 0.5 / beta) ** 2 + (r + 0.5 / beta) ** 2,
        "apo_zero": lambda c, r, beta, wrong: 1 - (beta * c).sigmoid() + (beta * r).sigmoid(),
        "apo_down": lambda c, r, beta, wrong: (beta * c).sigmoid() + 1 - (beta * (c - r)).sigmoid(),
        "sigmoid_norm": lambda c, r, beta, wrong: -log_sigmoid(beta * (c - r)),
    }
)

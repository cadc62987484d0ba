"""Cross entropy over logits that are sharded along the vocabulary, so that no rank ever holds them whole.

Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3 (the fused cross entropy of the parallel output layer).
Shapes: N positions, V entries of the vocabulary, L of them on this rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..._compat.torch import all_reduce
from ...step.token_loss import targets
from ...strategy.contract import IGNORED_LABEL


def sharded_token_loss_sum(logits_BSL: Tensor, labels_BS: Tensor, start: int, group: dist.ProcessGroup) -> Tensor:
    """`meshwright.step.token_loss.token_loss_sum` of sharded logits: a scalar, equal on all ranks of the group.

    Args:
        logits_BSL: this rank's entries of the vocabulary, floating point; half precision is computed in float32.
        labels_BS: int64, (B, S), unshifted.
        start: the first entry of this rank.
        group: the ranks that hold the other entries.
    """
    return sharded_target_loss_sum(logits_BSL, targets(labels_BS), start, group)


def sharded_target_loss_sum(logits_BSL: Tensor, targets_BS: Tensor, start: int, group: dist.ProcessGroup) -> Tensor:
    """`sharded_token_loss_sum` with the label that each position predicts."""
    if logits_BSL.dtype in (torch.float16, torch.bfloat16):
        logits_BSL = logits_BSL.float()
    loss: Tensor = _ShardedCrossEntropy.apply(logits_BSL.flatten(0, 1), targets_BS.flatten(), start, group)
    return loss


class _ShardedCrossEntropy(torch.autograd.Function):
    """Sum over unmasked targets of log(sum(exp(logits))) - logits[target]."""

    @staticmethod
    def forward(ctx: Any, logits_NL: Tensor, targets_N: Tensor, start: int, group: dist.ProcessGroup) -> Tensor:
        kept_N = targets_N != IGNORED_LABEL
        local_N = targets_N - start
        here_N = kept_N & (local_N >= 0) & (local_N < logits_NL.shape[1])
        local_N = torch.where(here_N, local_N, 0)
        # A rank may hold no entry at all, where the vocabulary is small.
        low = torch.finfo(logits_NL.dtype).min
        highest_N = logits_NL.new_full((logits_NL.shape[0],), low)
        if logits_NL.shape[1]:
            highest_N = logits_NL.amax(-1)
        highest_N = all_reduce(highest_N, "max", group)
        shifted_NL = logits_NL - highest_N[:, None]
        chosen_N = logits_NL.new_zeros(logits_NL.shape[0])
        if logits_NL.shape[1]:
            chosen_N = torch.where(here_N, shifted_NL.gather(1, local_N[:, None])[:, 0], 0.0)
        exp_NL = shifted_NL.exp_()
        # One message for both sums.
        sum_N, target_N = all_reduce(torch.stack([exp_NL.sum(-1), chosen_N]), "sum", group)
        ctx.save_for_backward(exp_NL.div_(sum_N[:, None]), local_N, here_N, kept_N)
        return torch.where(kept_N, sum_N.log() - target_N, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        softmax_NL, local_N, here_N, kept_N = ctx.saved_tensors
        grad_NL = softmax_NL * kept_N[:, None]
        if grad_NL.shape[1]:
            grad_NL.scatter_add_(1, local_N[:, None], -here_N[:, None].to(grad_NL.dtype))
        return grad_NL.mul_(grad), None, None, None

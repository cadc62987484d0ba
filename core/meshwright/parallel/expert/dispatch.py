"""Send tokens to the ranks of their experts, and take back what these make of them.

Shapes: T tokens on this rank, K experts of each, D features, E experts in all, L = E / ep of them on this rank. A row
is a token on its way to one of its experts: (D,). Each rank sends the rows of others' experts and no others: counts
are exchanged first, and nothing is padded or dropped. A rank that sends or receives none takes part all the same, in
backward too.

Rows are sorted by expert, so counts say all that the receiver must know; the routing weights stay with the sender,
since experts multiply with them last.
Source: Lepikhin et al. 2020, arXiv:2006.16668, section 3; without capacity, as Gale et al. 2022, arXiv:2211.15841.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from ..._compat.torch import all_to_all
from ...tensors.on_host import on_host

LocalExperts: TypeAlias = "Callable[[Tensor, Tensor, Tensor], Tensor]"
"""The model's own forward on this rank's experts: rows (R, D), index (R, 1) below L, weights (R, 1) to rows (R, D)."""


class Exchange(torch.autograd.Function):
    """Rows to the ranks of a group, so many to each; the gradients take the way back.

    Args:
        rows: (sum of sends, D), one behind the other by receiver.
        sends, receives: rows to and from each rank.

    Returns:
        (sum of receives, D), one behind the other by sender.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sends: list[int], receives: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sends, ctx.receives, ctx.group = sends, receives, group
        return all_to_all(rows, group, sends, receives)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return all_to_all(grad, ctx.group, ctx.receives, ctx.sends), None, None, None


def dispatched(
    experts: LocalExperts,
    hidden_TD: Tensor,
    index_TK: Tensor,
    weights_TK: Tensor,
    *,
    count: int,
    group: dist.ProcessGroup,
) -> Tensor:
    """What a module of `count` experts makes of this rank's tokens, when the ranks of `group` have equal parts of them.

    Args:
        experts: this rank's.
        index_TK: int64; entries outside of [0, count) are no expert and add nothing.

    Returns:
        (T, D), in the dtype of the hidden states.
    """
    tokens, choices = index_TK.shape
    ranks = dist.get_world_size(group)
    # What is no expert comes last.
    ids = torch.where((index_TK >= 0) & (index_TK < count), index_TK, count).flatten()
    order = torch.argsort(ids, stable=True)
    # Not by `bincount`, which waits for the device.
    sent_E = ids.new_zeros(count + 1).scatter_add_(0, ids, torch.ones_like(ids))[:count]
    sent_RL = sent_E.view(ranks, count // ranks)
    received_RL = all_to_all(sent_RL, group)
    # The one wait of a layer: messages need their lengths on the host.
    sends, receives = on_host(torch.stack([sent_RL.sum(1), received_RL.sum(1)])).tolist()
    order = order[: sum(sends)]

    rows: Tensor = Exchange.apply(hidden_TD[order // choices], sends, receives, group)
    local = torch.arange(count // ranks, device=ids.device).repeat(ranks)
    local = local.repeat_interleave(received_RL.flatten(), output_size=sum(receives))
    back = Exchange.apply(_computed(experts, rows, local), receives, sends, group)

    placed = back.new_zeros(tokens * choices, back.shape[1]).index_copy(0, order, back)
    weighted = placed.view(tokens, choices, -1) * weights_TK[..., None]
    return weighted.sum(1).to(hidden_TD.dtype)


def _computed(experts: LocalExperts, rows: Tensor, local: Tensor) -> Tensor:
    """The experts' answers to rows, with weights of one."""
    if rows.shape[0]:
        return experts(rows, local[:, None], rows.new_ones(rows.shape[0], 1))
    # A row of which nothing remains: the parameters get gradients of zero, as those of unused experts under `single`,
    # and backward comes by the exchanges.
    row = rows.sum(0, keepdim=True)
    return experts(row, local.new_zeros(1, 1), row.new_ones(1, 1))[:0]

"""When units are gathered: ahead of their use, and not at all where backward does not need them.

Gathering itself, and freeing, is torch's.
Source: FSDPModule.set_modules_to_forward_prefetch and its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule


def prefetch(root: FSDPModule, blocks: Sequence[Sequence[FSDPModule]], *, forward: int, backward: int) -> None:
    """Gather the next units before they are needed, across stacks.

    Args:
        root: runs first in forward, and first in backward.
        blocks: the other units in the order of their forward, each with the experts that are units within it, which
            are gathered with it.
        forward: units to gather ahead in forward.
        backward: units to gather ahead in backward.
    """
    for chain, depth, prefetched in (
        ([[root], *blocks], forward, FSDPModule.set_modules_to_forward_prefetch),
        ([[root], *reversed(blocks)], backward, FSDPModule.set_modules_to_backward_prefetch),
    ):
        for index, (unit, *inside) in enumerate(chain):
            prefetched(unit, [*inside, *(each for units in chain[index + 1 : index + 1 + depth] for each in units)])


def skip_frozen_backward(unit: nn.Module) -> None:
    """Do not gather a frozen unit for backward in steps where no gradient runs through it.

    torch gathers a unit ahead of its backward whether it has one or not. A frozen tower in front of what trains has
    none; a frozen block between trained ones has, and must be gathered. Whether its output requires a
    gradient decides.

    Args:
        unit: on which `fully_shard` was called; nothing is done where it trains.
    """
    if not any(parameter.requires_grad for parameter in unit.parameters()):
        unit.register_forward_hook(_note_gradient)


def _note_gradient(unit: nn.Module, args: Any, output: Any) -> None:
    if isinstance(unit, FSDPModule):
        unit.set_unshard_in_backward(_may_need_gradient(output))


def _may_need_gradient(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.requires_grad
    if value is None or isinstance(value, bool | int | float | str):
        return False
    if isinstance(value, dict):
        return any(map(_may_need_gradient, value.values()))
    if isinstance(value, tuple | list):
        return any(map(_may_need_gradient, value))
    if is_dataclass(value):
        return any(_may_need_gradient(getattr(value, each.name)) for each in fields(value))
    # Who knows what it holds.
    return True

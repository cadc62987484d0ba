"""Exponential moving averages of trained parameters, sharded as the parameters are."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from .ops import copy_all
from .pieces import Piece, Sharded
from .state import Parts, sharded

COUNTS = "(counts)"
"""Name of `Averages.counts` in saved state; no parameter has it."""


class Averages:
    """Moving averages of the parameters that this rank steps, in float32 or in the parameter's dtype if wider.

    Args:
        names: names of the optimizer's parameters.
        parts: how the parameters are sharded.

    Attributes:
        counts: optimizer steps and updates, int64, (2,), on the CPU; kept by the caller, saved with the averages.
    """

    def __init__(self, names: Mapping[nn.Parameter, str], parts: Parts) -> None:
        self._names, self._parts = dict(names), parts
        self._values = {
            each: parts.empty(each, torch.promote_types(each.dtype, torch.float32)).detach() for each in names
        }
        self.counts = torch.zeros(2, dtype=torch.int64)
        self.begin()

    def begin(self) -> None:
        """Set the averages to the current weights."""
        copy_all(*self._local())

    @torch.no_grad()
    def update(self, decay: float) -> None:
        """Set each average to `decay` * average + (1 - `decay`) * weight."""
        averages, weights = self._local()
        alike = [index for index, each in enumerate(averages) if each.dtype == weights[index].dtype]
        if alike:
            get_ema_multi_avg_fn(decay)([averages[i] for i in alike], [weights[i] for i in alike], 0)
        for average, weight in zip(averages, weights, strict=True):
            if average.dtype != weight.dtype:
                # One at a time: wide copies of all weights would take more memory than the averages.
                average.lerp_(weight.to(average.dtype), 1 - decay)

    @torch.no_grad()
    def exchange(self) -> Exchanged:
        """Put the averages, rounded to the parameters' dtypes, in place of the weights until `Exchanged.undo`."""
        averages, weights = self._local()
        kept: list[Tensor | None] = []
        for average, weight in zip(averages, weights, strict=True):
            if average.dtype == weight.dtype:
                _swap(average, weight)
                kept.append(None)
            else:
                kept.append(weight.clone())
                weight.copy_(average)
        return Exchanged(averages, weights, kept)

    def sharded(self) -> dict[str, Sharded]:
        """Return this rank's averages by parameter name, and `COUNTS`, as views."""
        found = {name: sharded(self._values[each], each, self._parts) for each, name in self._names.items()}
        return {**found, COUNTS: Sharded(self.counts.shape, self.counts.dtype, (Piece((0,), self.counts),))}

    def _local(self) -> tuple[list[Tensor], list[Tensor]]:
        return [_local(each) for each in self._values.values()], [_local(each) for each in self._values]


class Exchanged:
    """Averages that stand in place of the weights."""

    def __init__(self, averages: list[Tensor], weights: list[Tensor], kept: list[Tensor | None]) -> None:
        self._all = list(zip(averages, weights, kept, strict=True))

    @torch.no_grad()
    def undo(self) -> None:
        """Restore weights and averages, bit for bit."""
        for average, weight, kept in self._all:
            if kept is None:
                _swap(average, weight)
            else:
                weight.copy_(kept)


def _swap(one: Tensor, other: Tensor) -> None:
    before = one.clone()
    one.copy_(other)
    other.copy_(before)


def _local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

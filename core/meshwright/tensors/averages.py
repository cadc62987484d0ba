"""Moving averages of what one manager trains: each rank has those of the parts that it steps, and nothing is gathered.

Source: torch.optim.swa_utils.get_ema_multi_avg_fn, which computes them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from .copies import copy_all
from .pieces import Piece, Sharded
from .state import Parts, sharded

COUNTS = "(counts)"
"""Stands for what has been counted, where names of parameters do: no parameter is called so."""


class Averages:
    """Averages beside weights, divided over ranks as the optimizer's state is; of the weights at first.

    In float32, or in the dtype of the weights where that is wider.

    Args:
        names: of what the optimizer trains: DTensors, stretches of parameters, or whole ones, and perhaps in a wider
            dtype than the model computes with.
        parts: how these are divided.

    Attributes:
        counts: steps of the optimizer, and updates; int64, (2,), on the CPU. Kept with the averages, for whoever
            updates them.
    """

    def __init__(self, names: Mapping[nn.Parameter, str], parts: Parts) -> None:
        self._names, self._parts = dict(names), parts
        self._values = {
            each: parts.empty(each, torch.promote_types(each.dtype, torch.float32)).detach() for each in names
        }
        self.counts = torch.zeros(2, dtype=torch.int64)
        self.begin()

    def begin(self) -> None:
        """Take the weights as they are."""
        copy_all(*self._local())

    @torch.no_grad()
    def update(self, decay: float) -> None:
        """Become `decay` times what they were and 1 - `decay` times the weights."""
        averages, weights = self._local()
        alike = [index for index, each in enumerate(averages) if each.dtype == weights[index].dtype]
        if alike:
            get_ema_multi_avg_fn(decay)([averages[i] for i in alike], [weights[i] for i in alike], 0)
        for average, weight in zip(averages, weights, strict=True):
            if average.dtype != weight.dtype:
                # One at a time: wide copies of all would take more than the averages.
                average.lerp_(weight.to(average.dtype), 1 - decay)

    @torch.no_grad()
    def exchange(self) -> Exchanged:
        """Put the averages, rounded to its dtype, into what is trained, until `Exchanged.undo`."""
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
        """What this rank has of the averages, by names of parameters, and of `COUNTS`, as views of its memory."""
        found = {name: sharded(self._values[each], each, self._parts) for each, name in self._names.items()}
        return {**found, COUNTS: Sharded(self.counts.shape, self.counts.dtype, (Piece((0,), self.counts),))}

    def _local(self) -> tuple[list[Tensor], list[Tensor]]:
        """The memory of the averages, and that of the weights."""
        return [_local(each) for each in self._values.values()], [_local(each) for each in self._values]


class Exchanged:
    """Averages that are in the place of weights; see `Averages.exchange`."""

    def __init__(self, averages: list[Tensor], weights: list[Tensor], kept: list[Tensor | None]) -> None:
        self._all = list(zip(averages, weights, kept, strict=True))

    @torch.no_grad()
    def undo(self) -> None:
        """Put both back, bit for bit."""
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

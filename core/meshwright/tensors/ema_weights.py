"""Exponential moving averages of parameters."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from .chunks import ChunkedTensor, LocalChunk
from .norms import to_local
from .ops import copy_all
from .state import ShardLayout, to_chunked_tensor

EMA_COUNTS = "(counts)"
"""Name of `EMAWeights.counts` in saved state; no parameter has it."""


class EMAWeights:
    """Moving averages of the parameters that this rank steps, in float32 or in the parameter's dtype if wider.

    `names` are those of the optimizer's parameters. The caller updates `counts`, int64 (2,) on the CPU: the numbers of
    optimizer steps and of updates, which are saved with the averages.
    """

    def __init__(self, names: Mapping[nn.Parameter, str], shard_layout: ShardLayout) -> None:
        self._names, self._shard_layout = dict(names), shard_layout
        self._averages = {
            each: shard_layout.allocate_shard(each, torch.promote_types(each.dtype, torch.float32)).detach()
            for each in names
        }
        self.counts = torch.zeros(2, dtype=torch.int64)
        self.reset()

    def reset(self) -> None:
        """Set the averages to the current weights."""
        copy_all(*self._get_local_pairs())

    @torch.no_grad()
    def update(self, decay: float) -> None:
        """Set each average to `decay` * average + (1 - `decay`) * weight."""
        pairs = list(zip(*self._get_local_pairs(), strict=True))
        if same_dtype := [(average, weight) for average, weight in pairs if average.dtype == weight.dtype]:
            get_ema_multi_avg_fn(decay)(*map(list, zip(*same_dtype, strict=True)), 0)
        for average, weight in pairs:
            if average.dtype != weight.dtype:
                # One at a time: converted copies of all weights would take more memory than the averages.
                average.lerp_(weight.to(average.dtype), 1 - decay)

    @torch.no_grad()
    def swap(self) -> SwappedWeights:
        """Replace the weights by the averages, rounded to the parameters' dtypes, until `SwappedWeights.restore`."""
        averages, weights = self._get_local_pairs()
        saved: list[Tensor | None] = []
        for average, weight in zip(averages, weights, strict=True):
            if average.dtype == weight.dtype:
                _swap(average, weight)
                saved.append(None)
            else:
                saved.append(weight.clone())
                weight.copy_(average)
        return SwappedWeights(averages, weights, saved)

    def to_chunked_tensors(self) -> dict[str, ChunkedTensor]:
        """Return this rank's averages by parameter name, and `counts` as `EMA_COUNTS`, as views."""
        averages = {
            name: to_chunked_tensor(self._averages[each], each, self._shard_layout)
            for each, name in self._names.items()
        }
        return {
            **averages,
            EMA_COUNTS: ChunkedTensor(self.counts.shape, self.counts.dtype, (LocalChunk((0,), self.counts),)),
        }

    def _get_local_pairs(self) -> tuple[list[Tensor], list[Tensor]]:
        return [to_local(each.detach()) for each in self._averages.values()], [
            to_local(each.detach()) for each in self._averages
        ]


class SwappedWeights:
    """The state of a swap of averages and weights; see `EMAWeights.swap`."""

    def __init__(self, averages: list[Tensor], weights: list[Tensor], saved_weights: list[Tensor | None]) -> None:
        self._entries = list(zip(averages, weights, saved_weights, strict=True))

    @torch.no_grad()
    def restore(self) -> None:
        """Restore weights and averages, bitwise identical."""
        for average, weight, saved in self._entries:
            if saved is None:
                _swap(average, weight)
            else:
                weight.copy_(saved)


def _swap(one: Tensor, other: Tensor) -> None:
    before = one.clone()
    one.copy_(other)
    other.copy_(before)

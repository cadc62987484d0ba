"""A strategy with an axis of its own: the ranks of `tp` hold copies of the model and share out the rows of a batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright import BatchError, DataParallelManager, StrategyConfig, StrategySpec, hookimpl
from meshwright.base.types import Batch
from meshwright.step.axis import Axis


class _GatherRows(torch.autograd.Function):
    """All sequences of a microbatch of which each rank has every n-th; gradients are summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, parts = group, [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.stack(parts, 1).flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        whole = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(whole, group=ctx.group)
        return whole[ctx.group.rank() :: ctx.group.size()], None


class RowsAxis(Axis):
    """Each rank of the group has every n-th sequence of a microbatch."""

    shards_batches = True

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._rank, self._size = group, group.rank(), group.size()
        self.replicas = self._size

    def check_batch(self, batch: Batch) -> None:
        if batch["input_ids"].shape[0] % self._size:
            raise BatchError(f"{batch['input_ids'].shape[0]} sequences do not divide among {self._size} ranks.")

    def shard_batch(self, batch: Batch) -> Batch:
        return {name: tensor[self._rank :: self._size] for name, tensor in batch.items()}

    def shard(self, whole: Tensor) -> Tensor:
        return whole[self._rank :: self._size]

    def gather(self, part: Tensor) -> Tensor:
        # A bool travels as a byte.
        number = part.to(torch.uint8) if part.dtype is torch.bool else part
        whole: Tensor = _GatherRows.apply(number, self._group)
        return whole.to(part.dtype)

    def reduce_losses(self, total: Tensor) -> None:
        dist.all_reduce(total, group=self._group)

    def reduce_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(gradient, group=self._group)
            parameter.grad = gradient


class RowsManager(DataParallelManager):
    axis: type[RowsAxis] = RowsAxis

    def shard(self, model: nn.Module) -> nn.Module:
        self.axes.append(self.axis(self.mesh.group("tp")))
        return model.to(self.mesh.device)


class RowsAxisWithoutGather(RowsAxis):
    """As one that was written before there were objectives."""

    gather = Axis.gather


class RowsWithoutGatherManager(RowsManager):
    axis = RowsAxisWithoutGather


@hookimpl
def register_strategies() -> list[StrategySpec]:
    axes = frozenset({"tp"})
    return [
        StrategySpec("rows", "rows shared out along tp", axes, StrategyConfig, RowsManager),
        StrategySpec("rows_without_gather", "takes no objective", axes, StrategyConfig, RowsWithoutGatherManager),
    ]

"""A strategy with an axis of its own: the ranks of `tp` hold copies of the model and share out the rows of a batch."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright import BatchError, DataParallelManager, StrategyConfig, StrategySpec, hookimpl
from meshwright.step.axis import Axis
from meshwright.strategy.contract import Batch


class Rows(Axis):
    """Each rank of the group has every n-th sequence of a microbatch."""

    divides_batches = True

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._rank, self._size = group, group.rank(), group.size()

    def check_batch(self, batch: Batch) -> None:
        if batch["input_ids"].shape[0] % self._size:
            raise BatchError(f"{batch['input_ids'].shape[0]} sequences do not divide among {self._size} ranks.")

    def divide(self, batch: Batch) -> Batch:
        return {name: tensor[self._rank :: self._size] for name, tensor in batch.items()}

    def add_losses(self, total: Tensor) -> None:
        dist.all_reduce(total, group=self._group)

    def add_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(gradient, group=self._group)
            parameter.grad = gradient


class RowsManager(DataParallelManager):
    def shard(self, model: nn.Module) -> nn.Module:
        self.axes.append(Rows(self.mesh.group("tp")))
        return model.to(self.mesh.device)


@hookimpl
def register_strategies() -> list[StrategySpec]:
    return [StrategySpec("rows", "rows shared out along tp", frozenset({"tp"}), StrategyConfig, RowsManager)]

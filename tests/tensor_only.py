"""A strategy that shards along `tp` and nothing else: core's tensor parallelism without a data-parallel strategy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from meshwright import StrategySpec, hookimpl
from meshwright.contract import StrategyConfig
from meshwright.data_parallel import DataParallelManager
from meshwright.tensor_parallel import TensorParallel


class TensorOnlyConfig(StrategyConfig):
    sequence_parallel: bool = False
    tp_plan: Any = None


class TensorOnlyManager(DataParallelManager):
    config: TensorOnlyConfig

    def shard(self, model: nn.Module) -> nn.Module:
        self.tensor_parallel = TensorParallel(
            model,
            self.layout,
            self.mesh["tp"],
            plan=self.config.tp_plan,
            sequence_parallel=self.config.sequence_parallel,
        )
        self.tensor_parallel.apply()
        return model

    def check_gradients(self) -> None:
        assert self.tensor_parallel is not None
        self.tensor_parallel.sum_partial_gradients()

    @contextmanager
    def unshard(self) -> Iterator[Sequence[nn.Module]]:
        assert self.tensor_parallel is not None
        with self.tensor_parallel.whole():
            yield [self.model]


@hookimpl
def register_strategies() -> list[StrategySpec]:
    return [StrategySpec("tensor_only", "tp alone", frozenset({"tp"}), TensorOnlyConfig, TensorOnlyManager)]

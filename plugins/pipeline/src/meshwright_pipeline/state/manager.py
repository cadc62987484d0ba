"""What a pipeline's manager holds between steps: the optimizers of its stages, and state under the whole model's names.

No forward, no gradient; how state goes through the stages is in the modules beside.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from meshwright.base.types import OptimizerFactory
from meshwright.manager.data_parallel import DataParallelManager
from meshwright.manager.start import require_optimizer
from meshwright.optim.groups import Trained, for_model
from meshwright.strategy.contract import StrategyManager
from meshwright.tensors.averages import Averages
from meshwright.tensors.pieces import Sharded
from meshwright.tensors.state import OptimizerState, ShardedState, TensorKind

from .optimizer import NoStages, StageOptimizers
from .parameter_names import Names
from .pieces_of_stages import loading_stages, stages_parameters, stages_state
from .whole_state import load_whole_state, whole_state


class StatefulStages(StrategyManager):
    """The optimizer and the state of a model in stages."""

    _optimizer: Optimizer | None = None

    @property
    @abstractmethod
    def _managers(self) -> Mapping[int, DataParallelManager]:
        """Of this rank's stages, by their numbers."""

    @property
    @abstractmethod
    def _names(self) -> Names:
        """Of the whole model."""

    @abstractmethod
    def _settle(self) -> None:
        """Called before the optimizer steps."""

    @property
    def model_parts(self) -> Sequence[nn.Module]:
        return [manager.model for manager in self._managers.values()]

    # -- the optimizer

    def build_optimizer(self, factory: OptimizerFactory) -> Optimizer:
        canonical = self._names.canonical
        trained = [manager for manager in self._managers.values() if any(True for _ in manager.trainable())]
        mine = {canonical[name]: each for manager in trained for name, each in manager.what_is_trained().items()}
        known: list[dict[str, Trained]] = [{}] * self.mesh.degrees.pp
        dist.all_gather_object(known, mine, group=self.mesh.group("pp"))
        whole = {name: each for stages in known for name, each in stages.items()}
        made = self.mesh.world.together(lambda: for_model(factory, whole))

        def named(given: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
            # The factory sees the names of the unwrapped model, so copies of one parameter get the same options.
            return made([(canonical[name], parameter) for name, parameter in given])

        self.mesh.world.together(lambda: [manager.build_optimizer(named) for manager in trained])
        rates: list[Any] = [None] * self.mesh.degrees.pp
        first = trained[0].optimizer.param_groups[0]["lr"] if trained else None
        dist.all_gather_object(rates, first, group=self.mesh.group("pp"))
        rate = next((each for each in rates if each is not None), 0.0)
        self._optimizer = StageOptimizers(trained) if trained else NoStages(rate)
        self._optimizer.register_step_pre_hook(lambda *_: self._settle())
        return self._optimizer

    @property
    def optimizer(self) -> Optimizer:
        return require_optimizer(self._optimizer)

    def optimizer_step(self) -> None:
        self.optimizer.step()

    def drop_gradients(self) -> None:
        self._settle()
        for manager in self._trained():
            manager.drop_gradients()

    # -- averages of what is trained

    def keep_averages(self) -> Sequence[Averages]:
        """See `meshwright.train.loop.ema.Averaging`: one for each stage of this rank that trains."""
        return [each for manager in self._trained() for each in manager.keep_averages()]

    @contextmanager
    def averaged(self) -> Iterator[None]:
        with ExitStack() as contexts:
            for manager in self._trained():
                contexts.enter_context(manager.averaged())
            yield

    def _trained(self) -> list[DataParallelManager]:
        return [manager for manager in self._managers.values() if manager.has_optimizer]

    # -- whole parameters, and state

    @contextmanager
    def unshard(self) -> Iterator[Sequence[nn.Module]]:
        managers = self._managers.values()
        with ExitStack() as contexts:
            yield [part for manager in managers for part in contexts.enter_context(manager.unshard())]

    def state_dict(self, *, full: bool = False) -> dict[str, Any]:
        managers, names = self._managers, self._names
        if full:
            return whole_state(managers, names, self.mesh, with_optimizer=self._optimizer is not None)
        return {"stages": {index: manager.state_dict() for index, manager in managers.items()}}

    def load_state_dict(self, state: Mapping[str, Any], *, full: bool = False) -> None:
        managers, names = self._managers, self._names
        if full:
            load_whole_state(managers, names, self.mesh, state)
            return
        for index, manager in managers.items():
            manager.load_state_dict(state["stages"][index])

    def sharded_state(self) -> ShardedState:
        state = stages_state(self._managers, self._names)
        return replace(state, optimizer=OptimizerState()) if isinstance(self._optimizer, NoStages) else state

    def parameter_pieces(self) -> dict[str, Sharded | None]:
        return stages_parameters(self._managers, self._names)

    @contextmanager
    def loading(self, optimizer: OptimizerState[TensorKind] | None) -> Iterator[ShardedState]:
        with loading_stages(self._managers, self._names, optimizer) as target:
            yield target
        if isinstance(self._optimizer, NoStages) and optimizer is not None:
            self._optimizer.follow(optimizer.groups)

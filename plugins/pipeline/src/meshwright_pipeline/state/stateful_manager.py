"""State of a pipeline's manager between steps: optimizers of the stages, and state under names of the full model."""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.plugin import (
    ChunkedTensor,
    DataParallelManager,
    EMAWeights,
    OptimizerFactory,
    OptimizerState,
    ParamTraits,
    ShardedState,
    StrategyError,
    StrategyManager,
    TensorMeta,
    bind_to_model,
    require_optimizer,
)

from .full_state import gather_full_state, load_full_state
from .parameter_names import StagedParameterNames, load_stages, merge_parameter_chunks, merge_sharded_state


class StagedStateManager(StrategyManager):
    """Base class with the optimizer and the state of a model in stages."""

    _optimizer: Optimizer | None = None

    @property
    @abstractmethod
    def _managers(self) -> Mapping[int, DataParallelManager]:
        """Managers of this rank's stages, by stage number."""

    @property
    @abstractmethod
    def _names(self) -> StagedParameterNames:
        """Parameter names of the full model."""

    @abstractmethod
    def _finalize_step(self) -> None:
        """Hook called before the optimizer steps."""

    @property
    def model_parts(self) -> Sequence[nn.Module]:
        return [manager.model for manager in self._managers.values()]

    # -- the optimizer

    def build_optimizer(self, factory: OptimizerFactory) -> Optimizer:
        canonical = self._names.first_name
        trained = [manager for manager in self._managers.values() if any(True for _ in manager.iter_trainable())]
        mine = {
            canonical[name]: each for manager in trained for name, each in manager.describe_trained_params().items()
        }
        known: list[dict[str, ParamTraits]] = [{}] * self.mesh.degrees.pp
        dist.all_gather_object(known, mine, group=self.mesh.group("pp"))
        all_params = {name: each for stages in known for name, each in stages.items()}
        bound_factory = self.mesh.world.run_on_all_ranks(lambda: bind_to_model(factory, all_params))

        def named(given: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
            # The factory sees the names of the unwrapped model, so copies of one parameter get the same options.
            return bound_factory([(canonical[name], parameter) for name, parameter in given])

        self.mesh.world.run_on_all_ranks(lambda: [manager.build_optimizer(named) for manager in trained])
        rates: list[Any] = [None] * self.mesh.degrees.pp
        first = trained[0].optimizer.param_groups[0]["lr"] if trained else None
        dist.all_gather_object(rates, first, group=self.mesh.group("pp"))
        rate = next((each for each in rates if each is not None), 0.0)
        self._optimizer = CombinedStageOptimizer(trained) if trained else FrozenStageOptimizer(rate)
        self._optimizer.register_step_pre_hook(lambda *_: self._finalize_step())
        return self._optimizer

    @property
    def optimizer(self) -> Optimizer:
        return require_optimizer(self._optimizer)

    def optimizer_step(self) -> None:
        self.optimizer.step()

    def drop_gradients(self) -> None:
        self._finalize_step()
        for manager in self._trained_managers():
            manager.drop_gradients()

    # -- moving averages

    def enable_ema(self) -> Sequence[EMAWeights]:
        """See `meshwright.training.loop.ema.EMA`: one for each stage of this rank that trains."""
        return [each for manager in self._trained_managers() for each in manager.enable_ema()]

    @contextmanager
    def swap_ema(self) -> Iterator[None]:
        with ExitStack() as contexts:
            for manager in self._trained_managers():
                contexts.enter_context(manager.swap_ema())
            yield

    def _trained_managers(self) -> list[DataParallelManager]:
        return [manager for manager in self._managers.values() if manager.has_optimizer]

    # -- full parameters, and state

    @contextmanager
    def unshard(self) -> Iterator[Sequence[nn.Module]]:
        managers = self._managers.values()
        with ExitStack() as contexts:
            yield [part for manager in managers for part in contexts.enter_context(manager.unshard())]

    def state_dict(self, *, full: bool = False) -> dict[str, Any]:
        managers, names = self._managers, self._names
        if full:
            return gather_full_state(managers, names, self.mesh, with_optimizer=self._optimizer is not None)
        return {"stages": {index: manager.state_dict() for index, manager in managers.items()}}

    def load_state_dict(self, state: Mapping[str, Any], *, full: bool = False) -> None:
        managers, names = self._managers, self._names
        if full:
            load_full_state(managers, names, self.mesh, state)
            return
        for index, manager in managers.items():
            manager.load_state_dict(state["stages"][index])

    def sharded_state(self) -> ShardedState:
        state = merge_sharded_state(self._managers, self._names)
        return (
            replace(state, optimizer=OptimizerState()) if isinstance(self._optimizer, FrozenStageOptimizer) else state
        )

    def parameter_chunks(self) -> dict[str, ChunkedTensor | None]:
        return merge_parameter_chunks(self._managers, self._names)

    @contextmanager
    def load_sharded_state(self, optimizer: OptimizerState[TensorMeta] | None) -> Iterator[ShardedState]:
        with load_stages(self._managers, self._names, optimizer) as target:
            yield target
        if isinstance(self._optimizer, FrozenStageOptimizer) and optimizer is not None:
            self._optimizer.copy_rates(optimizer.groups)


# -- optimizers over the stages of a rank


class CombinedStageOptimizer(Optimizer):
    """Optimizer that delegates to the optimizers of this rank's trained stages, one or more.

    Groups and state are read from these at each access. Loading replaces the groups of an optimizer, so a stored list
    would pass a schedule's learning rates to old groups.
    """

    def __init__(self, managers: Sequence[DataParallelManager]) -> None:
        self._managers = tuple(managers)
        # A group without parameters passes torch's checks and is not added to a stage.
        super().__init__([{"params": []}], dict(managers[0].optimizer.defaults))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all stages. Set values in them; the list cannot be replaced."""
        return [group for manager in self._managers for group in manager.optimizer.param_groups]

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        if groups:
            raise StrategyError(
                "the parameter groups of a pipeline belong to its stages' optimizers and cannot be replaced as a "
                "list. Set values in the groups, or use add_param_group or load_state_dict."
            )

    @property
    def state(self) -> dict[Tensor, Any]:
        """The state of all stages' parameters. The mapping is a copy; its values are not."""
        return {p: values for manager in self._managers for p, values in manager.optimizer.state.items()}

    @state.setter
    def state(self, state: Mapping[Tensor, Any]) -> None:
        if state:
            raise StrategyError(
                "the state of a pipeline's optimizer belongs to its stages' optimizers and cannot be replaced. Use "
                "load_state_dict."
            )

    def step(self, closure: Any = None) -> None:
        """Step all stages, and drop the gradients."""
        for manager in self._managers:
            manager.optimizer_step()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        given = param_group["params"]
        parameters = [given] if isinstance(given, Tensor) else list(given)
        known = [{id(parameter) for parameter in manager.iter_trainable()} for manager in self._managers]
        parts = [[each for each in parameters if id(each) in own] for own in known]
        if sum(map(len, parts)) < len(parameters):
            raise StrategyError(
                f"of {len(parameters)} parameters of a new group, only {sum(map(len, parts))} belong to stages of this "
                f"rank. Take parameters from manager.model_parts, after parallelize."
            )
        for manager, part in zip(self._managers, parts, strict=True):
            if part:
                manager.optimizer.add_param_group({**param_group, "params": part})

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set groups and state in the optimizer of each stage; torch's `load_state_dict` calls this last."""
        groups, values = iter(state["param_groups"]), state["state"]
        for manager in self._managers:
            optimizer = manager.optimizer
            mine = [next(groups) for _ in optimizer.param_groups]
            own = {p: values[p] for group in mine for p in group["params"] if p in values}
            optimizer.__setstate__({"state": defaultdict(dict, own), "param_groups": mine})


class FrozenStageOptimizer(Optimizer):
    """Optimizer of a rank whose stages are frozen. It trains nothing and has the learning rate of other ranks."""

    def __init__(self, lr: float | Tensor) -> None:
        super().__init__([nn.Parameter(torch.zeros(()))], {"lr": lr})

    def step(self, closure: Any = None) -> None:
        """Do nothing."""

    def copy_rates(self, groups: Sequence[Mapping[str, Any]]) -> None:
        for group in groups[:1]:
            self.param_groups[0].update({key: value for key, value in group.items() if key in ("lr", "initial_lr")})

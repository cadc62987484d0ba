"""What a manager holds between steps: a model part, an optimizer, and their state by name.

How state moves between layouts is in `meshwright.tensors.state`; here is whose it is. No forward, no gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from pydantic import BaseModel
from torch import nn
from torch.optim import Optimizer

from ..base.errors import StrategyError
from ..mesh.mesh import Mesh
from ..model.layout import ModelLayout
from ..step.axis import Axis
from ..strategy.contract import OptimizerFactory, StrategyManager
from ..tensors.averages import Averages
from ..tensors.pieces import Sharded
from ..tensors.state import (
    DTENSORS,
    OptimizerState,
    Parts,
    ShardedState,
    TensorKind,
    load_model_state,
    load_optimizer_state,
    loading_optimizer,
    model_state,
    optimizer_state,
    sharded,
    sharded_model,
    sharded_optimizer,
)
from ..train.optimizer_groups import Trained, for_model, what_is_trained
from .call_order import require_model, require_optimizer
from .freezing import TrainableParameters
from .optimizer_trial import call_factory, check_optimizer


class StatefulManager(StrategyManager):
    """The optimizer and the state of one model part.

    Attributes:
        model: the Hugging Face model, unwrapped; its parameters may have been sharded in place.
        layout: the model's structure as it was before sharding.
        parameter_names: fully qualified names of what the optimizer trains, as it is after sharding.
        may_train: the parameters that may train; there after `parallelize`.
        axes: along which ranks share microbatches or the model, beside those of data; a strategy adds them when it
            shards, in the order in which they divide a microbatch.
        parts: how parameters and optimizer state are divided over ranks, for strategies that use no DTensors.
        averages: what `keep_averages` has begun.
    """

    model: nn.Module
    layout: ModelLayout
    parameter_names: Mapping[nn.Parameter, str]
    may_train: TrainableParameters
    axes: list[Axis]
    parts: Parts = DTENSORS
    averages: Averages | None = None

    def __init__(self, config: BaseModel, mesh: Mesh) -> None:
        self.config = config
        self.mesh = mesh
        self.axes = []
        self._optimizer: Optimizer | None = None
        self._parallelized = False

    @property
    def model_parts(self) -> Sequence[nn.Module]:
        self._require_model()
        return [self.model]

    @contextmanager
    def unshard(self) -> Iterator[Sequence[nn.Module]]:
        self._require_model()
        with ExitStack() as whole:
            for axis in self.axes:
                whole.enter_context(axis.whole())
            yield [self.model]

    # -- the optimizer

    def build_optimizer(self, factory: OptimizerFactory) -> Optimizer:
        """The factory's optimizer, if it steps what is trained as it would step whole parameters. Collective.

        Raises:
            StrategyError: on all ranks alike; names the optimizer.
            ConfigError: of the factory of a run file, likewise.
        """
        self._require_model()
        named = self.named_trainable()
        self.parameter_names = {parameter: name for name, parameter in named}
        trained = self.what_is_trained()
        optimizer = self.mesh.world.together(lambda: call_factory(for_model(factory, trained), named))
        check_optimizer(optimizer, self.parts, self.mesh.world)
        self._optimizer = optimizer
        optimizer.register_step_pre_hook(lambda *_: self.settle())
        optimizer.register_step_pre_hook(lambda *_: self.drop_frozen())
        return optimizer

    def drop_frozen(self) -> None:
        """Drop the gradients of what is frozen now; see [Note: frozen later]."""
        frozen = self.may_train.frozen()
        for name, trained in self.named_trainable() if frozen else ():
            if name in frozen:
                trained.grad = None

    def named_trainable(self) -> Sequence[tuple[str, nn.Parameter]]:
        """What the optimizer trains, by name, as `parts` knows it; for strategies to replace that train parts of their
        own."""
        return list(self.may_train.named())

    def what_is_trained(self) -> dict[str, Trained]:
        """What is known of the parameters that the optimizer trains, by name."""

        def shape(parameter: nn.Parameter) -> torch.Size:
            return self.parts.shape(parameter, parameter)

        return what_is_trained(self.model, self.layout, self.named_trainable(), shape)

    def settle(self) -> None:
        """Called before the optimizer steps."""

    def optimizer_step(self) -> None:
        optimizer = self.optimizer
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def drop_gradients(self) -> None:
        self.settle()
        self.optimizer.zero_grad(set_to_none=True)

    @property
    def has_optimizer(self) -> bool:
        """Whether `build_optimizer` has been called."""
        return self._optimizer is not None

    @property
    def optimizer(self) -> Optimizer:
        return require_optimizer(self._optimizer)

    # -- averages of what is trained

    def keep_averages(self) -> Sequence[Averages]:
        """See `meshwright.train.loop.ema.Averaging`.

        Raises:
            StrategyError: there is no optimizer, or there are averages already.
        """
        require_optimizer(self._optimizer)
        if self.averages is not None:
            raise StrategyError("this manager keeps an average of its weights already. Use that one.")
        self.averages = Averages(self.parameter_names, self.parts)
        return [self.averages]

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The averages in the place of the weights; as after loading them. Collective.

        Raises:
            StrategyError: none are kept.
        """
        if self.averages is None:
            raise StrategyError("this manager keeps no average of its weights. Make one first (mw.EMA).")
        with self.loading(None):
            exchanged = self.averages.exchange()
        try:
            yield
        finally:
            with self.loading(None):
                exchanged.undo()

    # -- state

    def state_dict(self, *, full: bool = False) -> dict[str, Any]:
        self._require_model()
        state: dict[str, Any] = {"model": model_state(self.model, self.mesh.world, full=full, parts=self.parts)}
        if self._optimizer is not None:
            state["optimizer"] = self.optimizer_state(full=full)
        return state

    def load_state_dict(self, state: Mapping[str, Any], *, full: bool = False) -> None:
        self._require_model()
        load_model_state(self.model, state["model"], self.mesh.world, full=full, parts=self.parts)
        if self._optimizer is not None:
            self.load_optimizer_state(state.get("optimizer", {}), full=full)

    def optimizer_state(self, *, full: bool) -> dict[str, Any]:
        """The optimizer's part of `state_dict`; for strategies to replace whose optimizer is divided in its own way."""
        return optimizer_state(self.optimizer, self.parameter_names, self.mesh.world, full=full, parts=self.parts)

    def load_optimizer_state(self, state: Mapping[str, Any], *, full: bool) -> None:
        """The optimizer's part of `load_state_dict`."""
        load_optimizer_state(self.optimizer, self.parameter_names, state, self.mesh.world, full=full, parts=self.parts)

    def sharded_state(self) -> ShardedState:
        self._require_model()
        optimizer = self._optimizer and sharded_optimizer(self._optimizer, self.parameter_names, self.parts)
        return ShardedState(sharded_model(self.model, self.parts), optimizer, self._sharded_averages())

    def _sharded_averages(self) -> dict[str, Sharded]:
        return self.averages.sharded() if self.averages is not None else {}

    def parameter_pieces(self) -> dict[str, Sharded | None]:
        self._require_model()
        return {name: sharded(value, value, self.parts) for name, value in self.model.named_parameters()}

    @contextmanager
    def loading(self, optimizer: OptimizerState[TensorKind] | None) -> Iterator[ShardedState]:
        self._require_model()
        state = ShardedState(sharded_model(self.model, self.parts), averages=self._sharded_averages())
        if optimizer is None:
            yield state
        else:
            with loading_optimizer(self.optimizer, self.parameter_names, optimizer, self.parts) as target:
                yield replace(state, optimizer=target)
        self.after_loading()

    def after_loading(self) -> None:
        """Called when parameters and optimizer state have been written in place."""

    def trainable(self) -> Iterator[nn.Parameter]:
        """The parameters that may train, each once, as they are after sharding; see [Note: frozen later]."""
        return (parameter for _, parameter in self.may_train.named())

    def _require_model(self) -> None:
        require_model(self.model if self._parallelized else None)

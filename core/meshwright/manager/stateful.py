"""The optimizer of a manager, averages of its weights, and its state by name, which moves between layouts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..base.errors import StrategyError
from ..base.types import OptimizerFactory
from ..model.layout import ModelLayout
from ..optim.groups import Trained, for_model, what_is_trained
from ..strategy.contract import StrategyManager
from ..tensors import state as states
from ..tensors.pieces import Sharded
from ..tensors.state import DTENSORS, Averages, OptimizerState, Parts, ShardedState, TensorKind
from .start import require_model, require_optimizer
from .steps import Steps, TrainableParameters


class StatefulManager(StrategyManager):
    """The part of `DataParallelManager`, which documents the attributes, that has the optimizer and the state."""

    model: nn.Module
    layout: ModelLayout
    parts: Parts = DTENSORS
    may_train: TrainableParameters
    parameter_names: Mapping[nn.Parameter, str]
    averages: Averages | None = None
    _steps: Steps
    _optimizer: Optimizer | None = None
    _parallelized = False

    def _require_model(self) -> None:
        require_model(self.model if self._parallelized else None)

    # -- hooks

    def named_trainable(self) -> Sequence[tuple[str, nn.Parameter]]:
        """What the optimizer trains, by name, as `parts` knows it."""
        return list(self.may_train.named())

    def optimizer_state(self, *, full: bool) -> dict[str, Any]:
        """Return the optimizer's part of `state_dict`."""
        names = self.parameter_names
        return states.optimizer_state(self.optimizer, names, self.mesh.world, full=full, parts=self.parts)

    def load_optimizer_state(self, state: Mapping[str, Any], *, full: bool) -> None:
        """Load the optimizer's part of `state_dict`."""
        names = self.parameter_names
        states.load_optimizer_state(self.optimizer, names, state, self.mesh.world, full=full, parts=self.parts)

    def after_loading(self) -> None:
        """Called when parameters and optimizer state have been written in place."""

    # -- the optimizer

    def build_optimizer(self, factory: OptimizerFactory) -> Optimizer:
        """Make the optimizer, and check that it steps what it gets as it would step whole parameters. Collective."""
        from ..optim.trial import call_factory, check_optimizer

        self._require_model()
        named, trained = self.named_trainable(), self.what_is_trained()
        self.parameter_names = {parameter: name for name, parameter in named}
        optimizer = self.mesh.world.together(lambda: call_factory(for_model(factory, trained), named))
        check_optimizer(optimizer, self.parts, self.mesh.world)
        self._optimizer = optimizer
        optimizer.register_step_pre_hook(lambda *_: self._steps.settle())
        optimizer.register_step_pre_hook(lambda *_: self.drop_frozen())
        return optimizer

    def what_is_trained(self) -> dict[str, Trained]:
        """Describe the unsharded parameters that the optimizer trains, by name."""
        named = self.named_trainable()
        return what_is_trained(self.model, self.layout, named, lambda each: self.parts.shape(each, each))

    @property
    def optimizer(self) -> Optimizer:
        return require_optimizer(self._optimizer)

    @property
    def has_optimizer(self) -> bool:
        return self._optimizer is not None

    def drop_frozen(self) -> None:
        """Drop the gradients of parameters that are frozen now; see [Note: frozen later]."""
        frozen = self.may_train.frozen()
        for name, trained in self.named_trainable() if frozen else ():
            if name in frozen:
                trained.grad = None

    def optimizer_step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def drop_gradients(self) -> None:
        self._steps.settle()
        self.optimizer.zero_grad(set_to_none=True)

    # -- averages

    def keep_averages(self) -> Sequence[Averages]:
        """Begin moving averages of the weights; see `meshwright.train.loop.ema.Averaging`."""
        require_optimizer(self._optimizer)
        if self.averages is not None:
            raise StrategyError("this manager keeps an average of its weights already. Use that one.")
        self.averages = Averages(self.parameter_names, self.parts)
        return [self.averages]

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the averages in place of the weights. Collective. StrategyError if none are kept."""
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
        state: dict[str, Any] = {"model": states.model_state(self.model, self.mesh.world, full=full, parts=self.parts)}
        if self._optimizer is not None:
            state["optimizer"] = self.optimizer_state(full=full)
        return state

    def load_state_dict(self, state: Mapping[str, Any], *, full: bool = False) -> None:
        self._require_model()
        states.load_model_state(self.model, state["model"], self.mesh.world, full=full, parts=self.parts)
        if self._optimizer is not None:
            self.load_optimizer_state(state.get("optimizer", {}), full=full)

    def sharded_state(self) -> ShardedState:
        optimizer = self._optimizer and states.sharded_optimizer(self._optimizer, self.parameter_names, self.parts)
        return replace(self._sharded_weights(), optimizer=optimizer)

    def parameter_pieces(self) -> dict[str, Sharded | None]:
        self._require_model()
        return {name: states.sharded(value, value, self.parts) for name, value in self.model.named_parameters()}

    @contextmanager
    def loading(self, optimizer: OptimizerState[TensorKind] | None) -> Iterator[ShardedState]:
        state = self._sharded_weights()
        if optimizer is None:
            yield state
        else:
            with states.loading_optimizer(self.optimizer, self.parameter_names, optimizer, self.parts) as target:
                yield replace(state, optimizer=target)
        self.after_loading()

    def _sharded_weights(self) -> ShardedState:
        self._require_model()
        averages = self.averages.sharded() if self.averages is not None else {}
        return ShardedState(states.sharded_model(self.model, self.parts), averages=averages)

"""Refuse calls of a manager in an order that cannot be right, in the same words under every strategy.

What is wrong with a model, a batch or an optimizer is found elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar
from weakref import WeakSet

from torch import nn
from torch.optim import Optimizer

from ..base.errors import ModelError, StrategyError

T = TypeVar("T")
_TAKEN: WeakSet[nn.Module] = WeakSet()
"""Modules of models that managers have, and that hold something."""


def check_new(model: nn.Module, *, has_model: bool) -> None:
    """Before `parallelize`.

    Raises:
        StrategyError: the manager has a model already.
        ModelError: another manager has the model, or a part of it, whose hooks and shards are the other one's.
    """
    if has_model:
        raise StrategyError("parallelize was called twice on one manager. Build another manager for another model.")
    if any(each in _TAKEN for each in model.modules()):
        raise ModelError(
            f"{type(model).__name__} has been parallelized by another manager already, and is that one's. Build the "
            f"model anew, or read it from what the other one has saved."
        )


def take(modules: Iterable[nn.Module]) -> None:
    """Note that a manager has these. Models of one class may share modules that hold nothing, such as an activation."""
    _TAKEN.update(each for each in modules if any(True for _ in (*each.parameters(), *each.buffers())))


def require_model(model: T | None) -> T:
    """What `parallelize` has made.

    Raises:
        StrategyError: `parallelize` has not been called.
    """
    if model is None:
        raise StrategyError("the manager has no model yet: call manager.parallelize(model) first.")
    return model


def require_optimizer(optimizer: Optimizer | None) -> Optimizer:
    """The optimizer.

    Raises:
        StrategyError: `build_optimizer` has not been called.
    """
    if optimizer is None:
        raise StrategyError("the manager has no optimizer yet: call manager.build_optimizer(factory) first.")
    return optimizer


def check_nothing_pending(trainable: Iterable[nn.Parameter]) -> None:
    """Before `forward_backward`: a second reduction would reduce the first one's result again.

    Args:
        trainable: what the optimizer trains on this rank.

    Raises:
        StrategyError: one of them has a gradient.
    """
    if any(parameter.grad is not None for parameter in trainable):
        raise StrategyError(
            "forward_backward was called while gradients of the last call are pending. Give all microbatches of a "
            "step in one call, and call optimizer_step (or set the gradients to None) before the next."
        )

"""The optimizer that Trainer steps, and the groups that it makes of parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from meshwright.base.errors import ConfigError, StrategyError
from meshwright.base.types import OptimizerFactory
from meshwright.strategy.contract import StrategyManager


class SteppedByManager:
    """What Trainer calls `step` of; anything else, such as its groups, is the manager's own optimizer's."""

    def __init__(self, manager: StrategyManager) -> None:
        self.manager = manager

    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Step and drop the gradients.

        Raises:
            ConfigError: a closure is given, which would need another backward.
        """
        if closure is not None:
            raise ConfigError("an optimizer over a mesh takes no closure.")
        self.manager.optimizer_step()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.manager.optimizer, name)


def grouped(
    cls: Callable[..., Optimizer],
    options: Mapping[str, Any],
    decayed: Collection[str],
    weight_decay: float,
    *,
    known: Collection[str],
) -> OptimizerFactory:
    """A factory with Trainer's two groups, of those parameters that are decayed and of the others.

    Args:
        decayed: their names, of the whole model.
        known: all names.

    Raises:
        StrategyError: of the factory, where a name is not known, so that nobody could say of which group it is.
    """

    def factory(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
        named = list(named_parameters)
        strange = sorted({name for name, _ in named} - set(known))
        if strange:
            raise StrategyError(f"the strategy calls a parameter {strange[0]!r}, and the model has none of that name.")
        groups = [
            {"params": [each for name, each in named if (name in decayed) == is_decayed], "weight_decay": decay}
            for is_decayed, decay in ((True, weight_decay), (False, 0.0))
        ]
        return cls([group for group in groups if group["params"]], **options)

    return factory

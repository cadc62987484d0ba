"""An exponential moving average of the weights, kept beside them under any strategy.

Each rank averages what it steps, in float32 or wider, so that nothing is sent and memory is divided as the strategy
divides that of the optimizer. Checkpoints have the averages by name, and any other layout loads them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, runtime_checkable

from ..base.errors import StrategyError
from ..strategy.contract import StrategyManager
from ..tensors.averages import Averages
from .optimizer_config import EMAConfig


@runtime_checkable
class Averaging(Protocol):
    """What a manager brings that can keep averages; those that derive from `DataParallelManager` do."""

    def keep_averages(self) -> Sequence[Averages]:
        """Begin with the weights as they are; one for each part of the model that this rank trains. From then on they
        are a part of `sharded_state` and of `loading`."""

    def averaged(self) -> AbstractContextManager[None]:
        """The averages in the place of the weights. Collective."""


class EMA:
    """An exponential moving average of what a manager's optimizer trains.

    It begins with the weights as they are when this is made, and is updated after each step of `manager.optimizer`,
    whoever makes it. Make it after `build_optimizer`, and before `load_checkpoint` where the checkpoint has an average.
    What is not trained has no average: its values are those of the model.

    Args:
        manager: with its optimizer.
        config: see `EMAConfig`.
        step: steps that the optimizer has done before.

    Raises:
        StrategyError: the manager has no optimizer, keeps an average already, or is of a strategy that cannot.
    """

    def __init__(self, manager: StrategyManager, config: EMAConfig | None = None, *, step: int = 0) -> None:
        if not isinstance(manager, Averaging):
            raise StrategyError(
                f"strategy {manager.strategy!r} keeps no averages of weights: {type(manager).__name__} has not "
                f"keep_averages and averaged. Leave ema out, or derive its manager from DataParallelManager."
            )
        self.config = config or EMAConfig()
        self._manager = manager
        optimizer = manager.optimizer
        self._averages = tuple(manager.keep_averages())
        for each in self._averages:
            each.counts[0] = step
        optimizer.register_step_post_hook(self._after_step)

    def decay_of(self, update: int) -> float:
        """The decay of an update, counted from 0."""
        decay = self.config.decay
        return min(decay, (1 + update) / (10 + update)) if self.config.warmup else decay

    def _after_step(self, *_: Any) -> None:
        for averages in self._averages:
            steps, updates = averages.counts.tolist()
            steps += 1
            if steps <= self.config.start:
                averages.begin()
            elif (steps - self.config.start) % self.config.every == 0:
                averages.update(self.decay_of(updates))
                updates += 1
            averages.counts[0], averages.counts[1] = steps, updates

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The averages, rounded to the dtypes of what is trained, in the place of the weights, to evaluate them or to
        use them otherwise; afterwards all is as it was, bit for bit. Not for training. Collective."""
        with self._manager.averaged():
            yield

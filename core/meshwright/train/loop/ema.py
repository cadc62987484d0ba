"""An exponential moving average of the weights, under any strategy.

Each rank averages what it steps, in float32 or wider: nothing is sent, and memory is sharded as the optimizer's state.
Checkpoints hold the averages by name, so that any other layout can load them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

from ...base.errors import StrategyError
from ...optim.config import EMA_SUFFIX, EMAConfig
from ...strategy.contract import StrategyManager
from ...tensors.state import EMAWeights
from .extension import LoopExtension


@runtime_checkable
class SupportsEMA(Protocol):
    """What a manager implements that can keep averages; those that derive from `DataParallelManager` do."""

    def enable_ema(self) -> Sequence[EMAWeights]:
        """Begin with the current weights, of each part of the model that this rank trains. From then on the averages
        are a part of `sharded_state` and of `loading`."""

    def swap_ema(self) -> AbstractContextManager[None]:
        """Put the averages in the place of the weights. Collective."""


class EMA(LoopExtension):
    """An exponential moving average of what a manager's optimizer trains.

    It begins with the current weights, and is updated after each step of `manager.optimizer`, whoever makes it. Make it
    after `build_optimizer`, and before `load_checkpoint` if the checkpoint has an average. Frozen parameters have no
    average: their values are those of the model.

    Args:
        manager: with its optimizer.
        start_step: steps that the optimizer has done before.

    Raises:
        StrategyError: the manager has no optimizer, keeps an average already, or is of a strategy that cannot.
    """

    def __init__(self, manager: StrategyManager, config: EMAConfig | None = None, *, start_step: int = 0) -> None:
        if not isinstance(manager, SupportsEMA):
            raise StrategyError(
                f"strategy {manager.strategy!r} keeps no averages of weights: {type(manager).__name__} has not "
                f"enable_ema and averaged. Leave ema out, or derive its manager from DataParallelManager."
            )
        self.config = config or EMAConfig()
        self._manager = manager
        optimizer = manager.optimizer
        self._ema_weights = tuple(manager.enable_ema())
        for each in self._ema_weights:
            each.counts[0] = start_step
        optimizer.register_step_post_hook(self._after_optimizer_step)

    def _after_optimizer_step(self, *_: Any) -> None:
        start, every, decay = self.config.start_step, self.config.every, self.config.decay
        for averages in self._ema_weights:
            steps, updates = averages.counts.tolist()
            steps += 1
            if steps <= start:
                averages.reset()
            elif (steps - start) % every == 0:
                averages.update(min(decay, (1 + updates) / (10 + updates)) if self.config.warmup else decay)
                updates += 1
            averages.counts[0], averages.counts[1] = steps, updates

    def swap(self) -> AbstractContextManager[None]:
        """Put the averages, rounded to the dtypes of the parameters, in the place of the weights, which come back bit
        for bit. Not for training. Collective."""
        return self._manager.swap_ema()

    def evaluate(self, compute_losses: Callable[[], dict[str, float]]) -> dict[str, float]:
        if not self.config.evaluate:
            return {}
        with self.swap():
            return {f"{name}{EMA_SUFFIX}": loss for name, loss in compute_losses().items()}

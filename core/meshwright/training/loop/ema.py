"""Exponential moving average (EMA) of the weights, under any strategy.

Each rank averages the parameter shards that it steps, in float32 or wider. This needs no communication, and the memory
is sharded like the optimizer state. Checkpoints contain the averages by name, so any other layout can load them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

from ...base.errors import StrategyError
from ...optim.config import EMA_SUFFIX, EMAConfig
from ...strategy.contract import StrategyManager
from ...tensors.ema_weights import EMAWeights
from .extension import LoopExtension


@runtime_checkable
class SupportsEMA(Protocol):
    """A manager that can keep averages of the weights. Subclasses of `DataParallelManager` do."""

    def enable_ema(self) -> Sequence[EMAWeights]:
        """Start averages at the current weights of the model parts that this rank trains. Afterwards `sharded_state`
        and `loading` include the averages."""

    def swap_ema(self) -> AbstractContextManager[None]:
        """Return a context in which the averages replace the weights. Collective."""


class EMA(LoopExtension):
    """Exponential moving average of the parameters that a manager's optimizer trains.

    It starts at the current weights and is updated after each step of `manager.optimizer`. Create it after
    `build_optimizer`, and before `load_checkpoint` if the checkpoint contains an average. Frozen parameters have no
    average of their own; their values are those of the model.

    Args:
        manager: a manager with an optimizer.
        config: options of the average; None: the defaults.
        start_step: number of optimizer steps already done.

    Raises:
        StrategyError: the manager has no optimizer, already keeps an average, or does not support averages.
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

    def __repr__(self) -> str:
        return f"EMA({self.config!r})"

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
        """Return a context in which the averages, rounded to the parameters' dtypes, replace the weights. On exit the
        weights are restored bitwise. Do not train within it. Collective."""
        return self._manager.swap_ema()

    def evaluate(self, compute_losses: Callable[[], dict[str, float]]) -> dict[str, float]:
        if not self.config.evaluate:
            return {}
        with self.swap():
            return {f"{name}{EMA_SUFFIX}": loss for name, loss in compute_losses().items()}

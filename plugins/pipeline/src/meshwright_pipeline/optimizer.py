"""One optimizer in front of those of several stages on one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer


class StageOptimizers(Optimizer):
    """Steps the optimizers of all stages; its parameter groups are theirs, so learning-rate schedulers reach them.

    Args:
        optimizers: at least one.
        step: steps them all, and drops the gradients.
    """

    def __init__(self, optimizers: Sequence[Optimizer], step: Callable[[], None]) -> None:
        groups = [group for each in optimizers for group in each.param_groups]
        super().__init__([dict(group) for group in groups], dict(optimizers[0].defaults))
        # The very same groups: what is written into one is written into the other.
        self.param_groups = groups
        self._step = step

    def step(self, closure: Any = None) -> None:
        """Step all stages."""
        self._step()

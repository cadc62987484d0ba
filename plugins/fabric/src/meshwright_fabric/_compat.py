"""Names of Lightning that are not public, each with the reason; tried with lightning 2.6.6.

In tests/test_fabric.py is a canary for each.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning.fabric.strategies import DDPStrategy

from meshwright.base.errors import StrategyError


class _OneCall:
    """What `fabric.no_backward_sync` asks of a strategy."""

    def no_backward_sync(self, module: Any, enabled: bool) -> AbstractContextManager[None]:
        if enabled:
            raise StrategyError(
                "no_backward_sync has no place under MeshStrategy: the loss is divided by the tokens of the whole "
                "step. Collect the step's microbatches and call the model once: loss = model([batch, batch])."
            )
        return nullcontext()


def refuse_accumulation(strategy: DDPStrategy) -> None:
    """Let `fabric.no_backward_sync` say what to do instead. Lightning keeps who answers it in `_backward_sync_control`;
    that of DDPStrategy would ask for torch's DistributedDataParallel, and None for a warning alone."""
    strategy._backward_sync_control = _OneCall()

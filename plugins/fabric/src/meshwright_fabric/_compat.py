"""Private names of Lightning 2.6.6; tests/test_fabric.py has a canary for each."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

from lightning.fabric.strategies import DDPStrategy

from meshwright.plugin import StrategyError


def forbid_no_backward_sync(strategy: DDPStrategy) -> None:
    """Make `fabric.no_backward_sync` raise an error with a remedy; with None instead, Lightning would only warn."""
    strategy._backward_sync_control = SimpleNamespace(no_backward_sync=_raise_if_enabled)


def _raise_if_enabled(module: Any, enabled: bool) -> AbstractContextManager[None]:
    if enabled:
        raise StrategyError(
            "no_backward_sync has no place under MeshStrategy: the loss is divided by the tokens of the whole step. "
            "Collect the step's microbatches and call the model once: loss = model([batch, batch])."
        )
    return nullcontext()

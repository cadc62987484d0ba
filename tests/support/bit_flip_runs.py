"""Runs of one rank in which a bit of a parameter flips."""

from __future__ import annotations

from typing import Any

from faults.bit_flips import flip_tensor_bit
from support.runs import run_rank_capturing
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from meshwright import StepResult
from meshwright.strategy.hooks import hookimpl
from meshwright.strategy.registry import get_registry

FLIPPED_AFTER = 2  # The step after which the bit flips


class _ParameterFlipper:
    """Flips a bit of what the optimizer of a run steps."""

    def __init__(self) -> None:
        self.stepped_parameters: list[Tensor] = []

    def record_parameters(self, optimizer: Optimizer, *_: Any) -> None:
        self.stepped_parameters = [p for group in optimizer.param_groups for p in group["params"]]

    @hookimpl
    def on_step_end(self, result: StepResult) -> None:
        if result.step == FLIPPED_AFTER:
            flip_tensor_bit(self.stepped_parameters[0])


def run_with_bit_flip(path: str) -> tuple[str, int]:
    """Run a run file on this rank, flip a bit after a step, and return error and exit code."""
    flips = _ParameterFlipper()
    hook = register_optimizer_step_post_hook(flips.record_parameters)
    try:
        with get_registry().observing(flips):
            return run_rank_capturing(path, None)[1:]
    finally:
        hook.remove()

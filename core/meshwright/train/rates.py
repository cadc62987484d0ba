"""The settings that a step is really made with, whatever stands between a schedule and the optimizer that steps.

A strategy may wrap the optimizer, or step others in its place. What all of them have in common is torch's Optimizer,
which tells of every step that is made.
Source: torch.optim.optimizer.register_optimizer_step_pre_hook.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..base.errors import TrainingError


@contextmanager
def groups_stepped() -> Iterator[list[dict[str, Any]]]:
    """Collect, within the context, the parameter groups of each optimizer that steps, as they are when it does.

    A wrapper counts beside what it wraps. Groups are copies; "params" is the number of parameters.
    """
    found: list[dict[str, Any]] = []

    def note(optimizer: Optimizer, *_: Any) -> None:
        found.extend({**group, "params": len(group["params"])} for group in optimizer.param_groups)

    handle = register_optimizer_step_pre_hook(note)
    try:
        yield found
    finally:
        handle.remove()


def check_rates(scheduled: Sequence[Any], stepped: Sequence[Mapping[str, Any]], *, step: int) -> None:
    """Refuse to go on where a step was made with a learning rate that the schedule does not say.

    Args:
        scheduled: of the schedule, by parameter group.
        stepped: see `groups_stepped`.
        step: number of the step, from 1.

    Raises:
        TrainingError: on the ranks that it happened on.
    """
    told = {float(rate) for rate in scheduled}
    used = {float(group["lr"]) for group in stepped if group["params"] and "lr" in group}
    if not used <= told:
        raise TrainingError(
            f"step {step} was made with the learning rate {_listed(used - told)}, but the schedule says "
            f"{_listed(told)}. An optimizer of the strategy does not heed the parameter groups that the schedule "
            f"sets. Checkpoints of earlier steps in this process are wrong in the same way; resume under a strategy "
            f"that passes `meshwright check`, from a checkpoint before."
        )


def _listed(rates: set[float]) -> str:
    return ", ".join(f"{rate:.6g}" for rate in sorted(rates))

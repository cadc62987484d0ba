"""The learning rate at some steps, as the schedule itself gives it."""

from __future__ import annotations

import torch
from torch import nn

from ...train.run_file import RunConfig
from ...train.schedules import build_scheduler


def rates_at(config: RunConfig) -> dict[int, float] | None:
    """Rates of the main group at the first step, after the warm-up, in the middle and at the end, by step from 1.

    Returns:
        None where the number of steps is not known before the data are.

    Raises:
        ConfigError: there is no such schedule.
    """
    steps = config.steps
    if steps is None:
        return None
    schedule = config.schedule.over(steps)
    stand_in = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=config.optimizer.lr)
    (factor,) = build_scheduler(schedule, stand_in, steps).lr_lambdas
    wanted = sorted({1, min(steps, schedule.warmup_steps + 1), (steps + 1) // 2, steps})
    return {step: config.optimizer.lr * factor(step - 1) for step in wanted}

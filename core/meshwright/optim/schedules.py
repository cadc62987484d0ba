"""Learning-rate schedules: any of transformers.get_scheduler that follows from the step alone."""

from __future__ import annotations

import math

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..base.errors import ConfigError, nearest
from .config import ScheduleConfig
from .optimizers import reason


def build_scheduler(config: ScheduleConfig, optimizer: Optimizer, steps: int) -> LRScheduler:
    """Make the learning-rate schedule over `steps` optimizer steps.

    Raises:
        ConfigError: no such schedule, a missing or unknown argument, or a schedule that follows a metric.
    """
    from transformers import SchedulerType, get_scheduler

    # These two are driven by a metric at each step, not by the step number.
    known = sorted(each.value for each in SchedulerType if each.value not in ("reduce_lr_on_plateau", "greedy"))
    if config.name not in known:
        raise ConfigError(f"schedule {config.name!r} is not one of {', '.join(known)}.{nearest(config.name, known)}")
    _check_schedule_is_heeded(config)
    try:
        return get_scheduler(
            config.name,
            optimizer,
            num_warmup_steps=config.warmup_steps,
            num_training_steps=steps,
            scheduler_specific_kwargs=dict(config.options),
        )
    except Exception as error:
        # Each schedule checks its options in its own way, or at its first value.
        raise ConfigError(f"schedule {config.name!r} refuses its options {config.options}: {error}") from error


def set_schedule(scheduler: LRScheduler, step: int) -> None:
    """Set a schedule of `build_scheduler`, and the rates of its optimizer, to where they are after `step` steps."""
    state = scheduler.state_dict()
    rates = [base * factor(step) for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
    scheduler.load_state_dict({**state, "last_epoch": step, "_step_count": step + 1, "_last_lr": rates})


def _check_schedule_is_heeded(config: ScheduleConfig) -> None:
    """Refuse what get_scheduler would silently drop."""
    if config.name == "constant" and config.warmup_steps:
        raise ConfigError(
            f"schedule 'constant' knows no warm-up, but schedule.warmup_steps={config.warmup_steps}. "
            f"Set schedule.name=constant_with_warmup, or warmup_steps=0."
        )
    if config.name in ("constant", "constant_with_warmup") and config.options:
        raise ConfigError(
            f"schedule {config.name!r} takes no options, but schedule.options holds {', '.join(config.options)}. "
            f"Remove them, or use another schedule."
        )
    for name, value in config.options.items():
        # None of the schedules has a switch, and their arithmetic makes zero of what is not finite.
        if isinstance(value, bool) or (isinstance(value, float) and not math.isfinite(value)):
            raise ConfigError(f"schedule.options.{name}={value!r} is no finite number. Change it, or leave it out.")


def check_schedule(config: ScheduleConfig, scheduler: LRScheduler, steps: int) -> None:
    """Refuse a schedule that has no usable rate at its ends, or at some steps between them."""
    sampled = {*range(0, steps, max(1, steps // 64)), 1, config.warmup_steps, steps - 1, steps}
    for step in sorted(sampled):
        try:
            rates = [base * factor(step) for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
            usable = all(math.isfinite(rate) and rate >= 0 for rate in rates)
        except Exception as error:
            raise ConfigError(
                f"schedule {config.name!r} with options {config.options} has no rate after step {step} of {steps}: "
                f"{reason(error)}. Change the options."
            ) from error
        if not usable:
            raise ConfigError(
                f"schedule {config.name!r} with options {config.options} gives the rates {rates} after step {step} of "
                f"{steps}, which must be finite and not below 0. Change the options."
            )

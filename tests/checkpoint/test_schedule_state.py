"""A schedule's state continues over parameter groups in another number and order than those it was saved of."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import CyclicLR, LambdaLR, LinearLR, LRScheduler, SequentialLR, StepLR

from meshwright import CheckpointError
from meshwright.checkpoint.training_state import load_scheduler_state, store_base_rates


def _optimizer(*rates: float) -> SGD:
    return SGD([{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates], lr=1.0, momentum=0.9)


def _loaded(optimizer: SGD, saved: SGD, order: list[int], scheduler: LRScheduler) -> dict[str, Any]:
    """Give an optimizer the settings of saved groups; return the schedule's state as it was saved."""
    for group, number in zip(optimizer.param_groups, order, strict=True):
        group.update({key: value for key, value in saved.param_groups[number].items() if key != "params"})
    return dict(json.loads(json.dumps(scheduler.state_dict(), default=dict)))


def _rates(scheduler: LRScheduler, optimizer: SGD, steps: int) -> list[list[float]]:
    found = []
    for _ in range(steps):
        found.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return found


SCHEDULES: dict[str, Callable[[SGD], LRScheduler]] = {
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "steps": lambda optimizer: StepLR(optimizer, 2, gamma=0.5),
    "one after the other": lambda optimizer: SequentialLR(
        optimizer, [LinearLR(optimizer, 0.1, total_iters=2), LambdaLR(optimizer, lambda step: 0.9**step)], [4]
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("order", [[0, 1], [1, 0], [1], [0, 1, 0, 1]], ids=str)
def test_each_group_continues_with_its_own_rate(name: str, order: list[int]) -> None:
    first = _optimizer(0.1, 0.03)
    scheduler = SCHEDULES[name](first)
    _rates(scheduler, first, 3)
    store_base_rates(scheduler)
    again = _optimizer(*(0.5 for _ in order))
    resumed = SCHEDULES[name](again)
    load_scheduler_state(resumed, _loaded(again, first, order, scheduler))
    assert resumed.get_last_lr() == [first.param_groups[number]["lr"] for number in order]
    expected = [[rates[number] for number in order] for rates in _rates(scheduler, first, 4)]
    assert _rates(resumed, again, 4) == expected


def test_what_no_group_brings_is_refused_in_another_number() -> None:
    first = _optimizer(0.1, 0.1)
    scheduler = CyclicLR(first, base_lr=0.01, max_lr=[0.2, 0.3], step_size_up=3)
    state = {key: value for key, value in scheduler.state_dict().items() if not key.startswith("_scale")}
    again = _optimizer(0.1)
    resumed = CyclicLR(again, base_lr=0.01, max_lr=0.2, step_size_up=3)
    again.param_groups[0].update(lr=first.param_groups[0]["lr"], initial_lr=first.param_groups[0]["initial_lr"])
    with pytest.raises(CheckpointError, match="max_lrs differ between 2 parameter groups, and this rank has 1"):
        load_scheduler_state(resumed, state)
    assert resumed.base_lrs == [0.01]

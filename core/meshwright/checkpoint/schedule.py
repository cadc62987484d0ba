"""The state of a learning-rate schedule, for any parameter groups.

torch's schedules keep lists with one entry for each parameter group. Other layouts have other groups in another order.
So each group saves its own rates, as `lr` and `initial_lr` among its settings, and the rest of the state is the first
rank's. Source: torch.optim.lr_scheduler.LRScheduler.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from ..base.errors import CheckpointError

_OF_GROUPS = {"base_lrs": "initial_lr", "_last_lr": "lr"}
_LISTS = ("lr_lambdas", "min_lrs", "max_lrs")
"""Lists by group that the groups' settings do not hold."""


def note_rates(scheduler: LRScheduler) -> None:
    """Write the base rates into the groups before saving, since a user may have changed them in the schedule."""
    for group, rate in zip(scheduler.optimizer.param_groups, getattr(scheduler, "base_lrs", ()), strict=False):
        group["initial_lr"] = rate


def load_schedule(scheduler: LRScheduler, saved: Mapping[str, Any]) -> None:
    """Load a schedule's state, after its optimizer's. Raises CheckpointError."""
    scheduler.load_state_dict(_of_groups(saved, scheduler.optimizer.param_groups))


def _of_groups(saved: Mapping[str, Any], groups: list[dict[str, Any]]) -> dict[str, Any]:
    state = dict(saved)
    for key, setting in _OF_GROUPS.items():
        if key in state and all(setting in group for group in groups):
            rates = [group[setting] for group in groups]
            state[key] = [rate.clone() if isinstance(rate, Tensor) else rate for rate in rates]
    for key in _LISTS:
        values = state.get(key)
        if not isinstance(values, list) or len(values) == len(groups):
            continue
        if not values or any(value != values[0] for value in values):
            raise CheckpointError(
                f"the schedule's {key} differ between {len(values)} parameter groups, and this rank has {len(groups)}. "
                f"Resume on the layout that the checkpoint was saved on."
            )
        state[key] = values[:1] * len(groups)
    if isinstance(state.get("milestones"), Mapping):
        # MultiStepLR counts by step; JSON has turned the steps into strings.
        state["milestones"] = Counter({int(step): times for step, times in state["milestones"].items()})
    if "_schedulers" in state:
        state["_schedulers"] = [_of_groups(each, groups) for each in state["_schedulers"]]
    return state

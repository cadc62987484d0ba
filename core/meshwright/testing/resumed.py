"""A run in parts: each from the checkpoint of the one before, under a schedule, with groups of different settings.

What is compared with one uninterrupted run under `single` are losses, norms and weights, and with which settings every
optimizer on every rank has stepped. Parameters may agree by luck, such as after a schedule's last steps; rates do not.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..checkpoint import load_checkpoint, save_checkpoint
from ..optim.schedules import build_scheduler
from ..train.loop.options import Loop
from ..train.loop.step import groups_stepped, train_step
from ..train.run.run_file import ScheduleConfig
from .case import Case, Outcome, share
from .parity import build_with_optimizer, full_weights
from .pool import pool

Settings = frozenset[tuple[str, Any]]
"""What a parameter group steps with: its entries that are numbers, texts or tuples of them."""


@dataclass(frozen=True)
class Part:
    """What a rank saw of some steps.

    Attributes:
        outcome: losses, norms, and weights at the end.
        reported: learning rate of each step, as observers are told.
        stepped: of each step, the settings of all groups of all optimizers that stepped.
    """

    outcome: Outcome
    reported: list[float]
    stepped: list[set[Settings]]


def train_resumed(
    strategy: str,
    config: Mapping[str, Any],
    sizes: Mapping[str, Any],
    case: Case,
    steps: range,
    source: str | None,
    target: str | None,
    device: str = "cpu",
) -> Part:
    """The task of one rank: some steps of the case by `train_step`, from a checkpoint if there is one."""
    manager, optimizer = build_with_optimizer(strategy, config, sizes, case, seed=steps.start, device=device)
    scheduler = build_scheduler(case.schedule or ScheduleConfig(name="constant"), optimizer, case.steps)
    place = manager.mesh.data_rank, manager.mesh.data_size
    loop = Loop(
        steps=case.steps,
        batches=lambda step: share(case, step, *place),
        scheduler=scheduler,
        max_grad_norm=case.max_norm,
        grad_norm_type=case.norm_type,
    )
    if source is not None:
        # A step of its own first, so that there is state to be replaced.
        train_step(manager, loop, 99)
        load_checkpoint(manager, source, scheduler=scheduler)
    results, stepped = [], []
    for step in steps:
        with groups_stepped() as groups:
            results.append(train_step(manager, loop, step))
        stepped.append({_settings(group) for group in groups if group["params"]})
    if target is not None:
        save_checkpoint(manager, target, step=steps.stop, scheduler=scheduler)
    outcome = Outcome([each.loss for each in results], [each.grad_norm for each in results], [], full_weights(manager))
    return Part(outcome, [each.learning_rate for each in results], stepped)


@functools.lru_cache(maxsize=64)
def uninterrupted(case: Case, device: str = "cpu") -> Part:
    """The case under `single`, on one rank, in one part."""
    case = case.undivided()
    (part,) = pool(1).run(train_resumed, "single", {}, {}, case, range(case.steps), None, None, device, device=device)
    return part


def wrong_rates(parts: Sequence[Part], steps: range, expected: Part) -> str:
    """What is wrong with the settings that the ranks of one part have stepped with; empty: nothing."""
    for number, step in enumerate(steps):
        known = expected.stepped[step]
        keys = {key for settings in known for key, _ in settings}
        used = [{_among(settings, keys) for settings in part.stepped[number]} for part in parts]
        whole: set[Settings] = set().union(*used)
        if whole != known:
            return f"step {step + 1} was made with {_told(whole - known)} instead of {_told(known - whole)}"
        rates = {value for settings in known for key, value in settings if key == "lr"}
        for rank, part in enumerate(parts):
            if part.reported[number] not in rates:
                return f"rank {rank} reports the rate {part.reported[number]} of step {step + 1}, not of {rates}"
    return ""


def _settings(group: Mapping[str, Any]) -> Settings:
    plain = {key: tuple(value) if isinstance(value, list) else value for key, value in group.items() if key != "params"}
    return frozenset(
        (key, value) for key, value in plain.items() if isinstance(value, bool | int | float | str | tuple)
    )


def _among(settings: Settings, keys: set[str]) -> Settings:
    return frozenset((key, value) for key, value in settings if key in keys)


def _told(groups: set[Settings]) -> str:
    parts = [", ".join(f"{k}={v}" for k, v in sorted(each) if k in ("lr", "weight_decay")) for each in groups]
    return " and ".join(f"({part})" for part in sorted(parts)) or "nothing"

"""What is known of a run before it begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright.plugin import ROOT_AXES, Degrees, MeshwrightError, build_scheduler
from meshwright_run.fate import Fate, check_output
from meshwright_run.run_file import RunConfig

from ..comparison import plan_of
from ..job import job_of
from ..trace import Job
from .holdings import Division, Held, division, whole_bytes


@dataclass(frozen=True)
class Facts:
    """What sentences are made of.

    Attributes:
        parameters, trainable: number of parameters of the whole model.
        held: by planned rank: parameters, gradients and optimizer state.
        plan: see `meshwright_plan.planned.plan`; None if the run cannot be planned, for the reason `why_not`.
        rates: learning rates by step; None: the number of steps is unknown.
        fate: what becomes of the output directory; None if the run is refused for it, for the reason `refusal`.
    """

    config: RunConfig
    job: Job
    parameters: int
    trainable: int
    held: Mapping[int, Mapping[str, Held]]
    plan: Mapping[str, Any] | None
    why_not: str
    rates: Mapping[int, float] | None
    fate: Fate | None
    refusal: str

    @property
    def degrees(self) -> Degrees:
        return self.job.degrees


def facts_of(config: RunConfig, world_size: int) -> Facts:
    """Plan a run on so many ranks.

    Raises:
        MeshwrightError: what is wrong with the run.
    """
    job = job_of(config, world_size)
    whole = list({id(each): each for each in job.model().parameters()}.values())
    trained = [each for each in whole if each.requires_grad]
    plan, why_not, held = None, "", {}
    try:
        plan = plan_of(config, world_size)
    except MeshwrightError as error:
        why_not = str(error)
    else:
        held = _held(plan, division(job), job.degrees, whole, trained)
    fate, refusal = None, ""
    try:
        fate = check_output(config, config.steps)
    except MeshwrightError as error:
        refusal = str(error)
    return Facts(
        config=config,
        job=job,
        parameters=sum(each.numel() for each in whole),
        trainable=sum(each.numel() for each in trained),
        held=held,
        plan=plan,
        why_not=why_not,
        rates=_rates(config),
        fate=fate,
        refusal=refusal,
    )


def _held(
    plan: Mapping[str, Any],
    found: Division,
    degrees: Degrees,
    whole: Sequence[nn.Parameter],
    trained: Sequence[nn.Parameter],
) -> dict[int, dict[str, Held]]:
    axes = [axis for axis in ROOT_AXES if getattr(degrees, axis) > 1]
    state = round(found.optimizer_bytes * sum(each.numel() for each in trained))

    def held(size: int, of: int, along: tuple[str, ...]) -> Held:
        return Held(size, of, along, tuple(axis for axis in axes if axis not in along))

    return {
        each["rank"]: {
            "parameters": held(each["held_by_owner"].get("parameters", 0), whole_bytes(whole), found.parameters),
            "gradients": held(each["gradients_bytes"], whole_bytes(trained), found.parameters),
            "optimizer": held(each["held_by_owner"].get("optimizer", 0), state, found.optimizer),
        }
        for each in plan["ranks"]
    }


def _rates(config: RunConfig) -> dict[int, float] | None:
    """Rates of the main group at the first step, after the warm-up, in the middle and at the end, by step from 1."""
    steps = config.steps
    if steps is None:
        return None
    schedule = config.schedule.over(steps)
    stand_in = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=config.optimizer.lr)
    (factor,) = build_scheduler(schedule, stand_in, steps).lr_lambdas
    wanted = sorted({1, min(steps, schedule.warmup_steps + 1), (steps + 1) // 2, steps})
    return {step: config.optimizer.lr * factor(step - 1) for step in wanted}

"""What is known of a run before it begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ...base.errors import MeshwrightError
from ...mesh.sizes import ROOT_AXES, Degrees
from ...plan.comparison import plan_of
from ...plan.job import job_of
from ...plan.trace import Job
from ...train.fate import Fate, check_output
from ...train.run_file import RunConfig
from .holdings import Division, Held, division, whole_bytes
from .rates import rates_at


@dataclass(frozen=True)
class Facts:
    """What sentences are made of.

    Attributes:
        parameters, trainable: of the whole model.
        held: by rank that was planned: parameters, gradients and optimizer state.
        plan: see `meshwright.plan.planned.plan`; None: the run cannot be planned.
        why_not: the reason then.
        rates: learning rates by step; None: how many steps there are is not known.
        fate: what becomes of the output directory; None: the run is refused for what is there.
        refusal: the reason then.
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
        rates=rates_at(config),
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

"""A budget of activations over the stages of a rank, by how many microbatches of each are in flight.

How it is divided over blocks is said in `meshwright.model.budget`.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence

from meshwright.base.errors import ConfigError
from meshwright.base.types import Batch
from meshwright.mesh.world import World
from meshwright.model.budget import BudgetedBlocks, choose, without_choice
from meshwright.model.knapsack import Moment

from ..schedule.order import Action, Kind
from .batches import Idle
from .orders import Orders
from .stage import PipelineStage


def check_activations(stages: Mapping[int, PipelineStage], orders: Orders, schedule: str | None) -> None:
    """Refuse a budget that would not be kept.

    Raises:
        ConfigError: on all ranks alike.
    """
    if orders.splits and _budgeted(stages):
        raise ConfigError(
            f"pp_schedule={schedule} holds what the gradients of weights need beyond a backward, which "
            f"activation_checkpointing does not count into budget_gb. Use a schedule with whole backwards, such as "
            f"1f1b or interleaved1f1b, or set activation_checkpointing to full or selective."
        )


def choose_activations(
    stages: Mapping[int, PipelineStage], orders: Orders, pieces: Sequence[Batch], world: World
) -> None:
    """Where there is a budget: choose what the blocks of this rank's stages hold. Collective, once.

    Args:
        stages: of this rank, by their numbers.
        orders: of the rank.
        pieces: microbatches of the first step.
        world: all ranks.

    Raises:
        ConfigError: the budget cannot be met; on all ranks alike.
    """
    budgeted = _budgeted(stages)
    if not budgeted:
        return
    order = orders.actions(orders.run_length(len(pieces)), train=True)
    actions = [action for action in order if isinstance(action, Action)]
    real = [piece for piece in pieces if not isinstance(piece, Idle)]
    largest = max(real, key=lambda piece: piece["input_ids"].numel())
    rehearsals = [functools.partial(stage.rehearse, largest) for stage in stages.values()]
    worlds = [stage.manager.mesh.world for stage in stages.values()]
    choose(budgeted, rehearsals, worlds, moments_of(actions, list(stages)), world)


def _budgeted(stages: Mapping[int, PipelineStage]) -> list[BudgetedBlocks]:
    return without_choice([stage.manager.activations for stage in stages.values()])


def moments_of(actions: Sequence[Action], stages: Sequence[int]) -> list[Moment]:
    """The moments of one rank at which most may be held.

    Args:
        actions: what the rank computes, in order.
        stages: of the rank.
    """
    flying: Counter[int] = Counter()
    moments: dict[Moment, None] = {}
    for action in actions:
        if action.kind is Kind.FORWARD:
            flying[action.stage] += 1
        elif action.kind is Kind.BACKWARD:
            moments[Moment(tuple(flying[stage] for stage in stages), stages.index(action.stage))] = None
            flying[action.stage] -= 1
    return [each for each in moments if not any(_covers(other, each) for other in moments if other != each)]


def _covers(other: Moment, each: Moment) -> bool:
    same = other.stage == each.stage
    return same and all(a >= b for a, b in zip(other.in_flight, each.in_flight, strict=True))

"""What an order is: the actions of each rank of a pipeline, and whether each stage computes each microbatch once.

How a schedule comes to its orders is said in `rules` and `from_csv`, when its actions run in `timeline`. Pure
arithmetic, no torch.

[Note: vocabulary] A *stage* is a run of consecutive blocks, a *rank* holds one or more stages, its *chunks*: chunk 0 is
the first of them in the model. A *looped* placement deals the stages out in turn (rank = stage % ranks); a *V* gives
rank r the stages r and 2 * ranks - 1 - r, so that both ends of the model are on rank 0. The backward of a stage is one
action (B), or two: the gradient of its input (I), for which the stage before waits, and that of its weights (W), for
which nothing waits and which can fill a bubble.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import StrEnum

from meshwright.base.errors import ConfigError


class Kind(StrEnum):
    """What an action does, by the letters that torch prints."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"


COMPUTE = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


@dataclass(frozen=True, slots=True)
class Action:
    """Something that the rank of `stage` does for one microbatch.

    A send or receive is named after the stage whose rank executes it: `1SEND_F0` gives stage 2 what `2RECV_F0` takes,
    and `2SEND_B0` gives stage 1 what `1RECV_B0` takes.
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @property
    def peer_stage(self) -> int:
        """The stage at the other end of a send or receive."""
        return self.stage + (1 if self.kind in (Kind.SEND_F, Kind.RECV_B) else -1)


@dataclass(frozen=True, slots=True)
class Exchange:
    """All that two ranks pass to each other at one moment: one batch of sends and receives on each of them."""

    peer: int
    """The other rank."""
    transfers: tuple[Action, ...]
    """As this rank does them, in the same order on both."""


@dataclass(frozen=True)
class Schedule:
    """What each rank computes, in order."""

    name: str
    ranks: int
    stages: int
    microbatches: int
    placement: tuple[int, ...]
    """The rank of each stage."""
    orders: tuple[tuple[Action, ...], ...]
    """For each rank, its computing actions."""

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds, in the model's order."""
        return tuple(stage for stage, owner in enumerate(self.placement) if owner == rank)


def check_actions(schedule: Schedule, place: Callable[[int, int], str]) -> None:
    """Check that each stage computes each microbatch once, forward and backward; not whether the order can run.

    Args:
        place: names an action in errors, by its rank and its index in the rank's order.

    Raises:
        ConfigError: an action is unknown, doubled, forgotten or on the wrong rank.
    """
    seen: dict[tuple[Kind, int, int], str] = {}
    for rank, order in enumerate(schedule.orders):
        for index, action in enumerate(order):
            where = f"{place(rank, index)} ({action})"
            _check_action(schedule, action, rank, where)
            # A whole backward stands for both of its parts.
            parts = [Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT] if action.kind is Kind.BACKWARD else [action.kind]
            for key in [(part, action.stage, action.microbatch) for part in parts]:
                if key in seen:
                    raise _refused(schedule, where, f"this was computed already by {seen[key]}. Leave one of them out")
            seen |= {(part, action.stage, action.microbatch): where for part in parts}
    _check_complete(schedule, seen)


def _check_action(schedule: Schedule, action: Action, rank: int, where: str) -> None:
    if action.kind not in COMPUTE:
        raise _refused(schedule, where, "a schedule holds computing actions only (F, B, I, W); transfers are derived")
    for what, value, limit in (
        ("stage", action.stage, schedule.stages),
        ("microbatch", action.microbatch, schedule.microbatches),
    ):
        if not 0 <= value < limit:
            raise _refused(schedule, where, f"{what} {value} is not among the {limit} {what}s, 0 to {limit - 1}")
    owner = schedule.placement[action.stage]
    if owner != rank:
        raise _refused(schedule, where, f"stage {action.stage} is on rank {owner}; it cannot be on two")


def _check_complete(schedule: Schedule, seen: Collection[tuple[Kind, int, int]]) -> None:
    for stage in range(schedule.stages):
        for microbatch in range(schedule.microbatches):
            missing = [
                str(Action(kind, stage, microbatch))
                for kind in (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
                if (kind, stage, microbatch) not in seen
            ]
            if missing:
                raise _refused(
                    schedule,
                    f"rank {schedule.placement[stage]}",
                    f"{' and '.join(missing)} missing. Each stage needs F and B, or F, I and W, of each microbatch",
                )


def _refused(schedule: Schedule, where: str, why: str) -> ConfigError:
    return ConfigError(f"{schedule.name}, {where}: {why}.")

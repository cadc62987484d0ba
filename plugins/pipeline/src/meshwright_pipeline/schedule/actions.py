"""Actions of a schedule, when they run, and what ranks send to each other. Imports no torch.

Times assume that communication takes no time; nothing is measured.

[Note: vocabulary] A *stage* is a sequence of consecutive blocks. A *rank* holds one or more stages, its *chunks*; chunk
0 is the first of them in the model. A *looped* placement assigns the stages in turn (rank = stage % ranks). A *V* gives
rank r the stages r and 2 * ranks - 1 - r, so that both ends of the model are on rank 0. The backward of a stage is one
action (B) or two: the gradient of its input (I), for which the previous stage waits, and that of its weights (W), for
which no stage waits and which can fill a bubble.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from meshwright.plugin import ConfigError


class ActionKind(StrEnum):
    """Kind of an action, with the letters that torch prints."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"


COMPUTE_KINDS = (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)

UNIT_COSTS: Mapping[ActionKind, float] = MappingProxyType(
    {ActionKind.FORWARD: 1.0, ActionKind.BACKWARD: 2.0, ActionKind.BACKWARD_INPUT: 1.0, ActionKind.BACKWARD_WEIGHT: 1.0}
)
"""Time of an action on one stage, in forwards, as the papers assume."""


@dataclass(frozen=True, slots=True)
class Action:
    """Action of the rank of `stage` for one microbatch.

    A send or receive is named after the stage whose rank executes it: `1SEND_F0` sends to stage 2, where `2RECV_F0`
    receives, and `2SEND_B0` sends to stage 1, where `1RECV_B0` receives.
    """

    kind: ActionKind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @property
    def peer_stage(self) -> int:
        """The stage at the other end of a send or receive."""
        return self.stage + (1 if self.kind in (ActionKind.SEND_F, ActionKind.RECV_B) else -1)


@dataclass(frozen=True, slots=True)
class P2PBatch:
    """All transfers between two ranks at one time, as one batch of sends and receives on each rank."""

    peer: int
    """The other rank."""
    transfers: tuple[Action, ...]
    """Sends and receives of this rank, in the same order as on the peer."""


@dataclass(frozen=True)
class Schedule:
    """Compute actions of each rank, in order."""

    name: str
    num_ranks: int
    num_stages: int
    num_microbatches: int
    placement: tuple[int, ...]
    """The rank of each stage."""
    actions_by_rank: tuple[tuple[Action, ...], ...]
    """For each rank, its compute actions."""

    def stages_on_rank(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a rank, ascending."""
        return tuple(stage for stage, owner in enumerate(self.placement) if owner == rank)

    @property
    def splits_backward(self) -> bool:
        """Whether backwards are split into input and weight gradients."""
        return any(action.kind is ActionKind.BACKWARD_INPUT for order in self.actions_by_rank for action in order)


Timeline = tuple[tuple[tuple[Action, float, float], ...], ...]
"""For each rank, its actions with their start and end."""
_CompletedAction = tuple[ActionKind, int, int]
"""Kind (F, I or W), stage and microbatch of a completed action. A full backward (B) counts as I."""


def check_actions(schedule: Schedule, describe_position: Callable[[int, int], str]) -> None:
    """Check that each stage computes each microbatch once, forward and backward.

    `describe_position` describes an action, by rank and index, in errors."""
    seen: dict[_CompletedAction, str] = {}
    for rank, order in enumerate(schedule.actions_by_rank):
        for index, action in enumerate(order):
            where = f"{describe_position(rank, index)} ({action})"
            _check_action(schedule, action, rank, where)
            # A backward that is not split counts as both of its parts.
            parts = (
                [ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT]
                if action.kind is ActionKind.BACKWARD
                else [action.kind]
            )
            for key in [(part, action.stage, action.microbatch) for part in parts]:
                if key in seen:
                    raise _schedule_error(
                        schedule, where, f"this is already computed by {seen[key]}. Remove one of them"
                    )
                seen[key] = where
    for stage in range(schedule.num_stages):
        for microbatch in range(schedule.num_microbatches):
            missing = [
                f"{stage}{kind}{microbatch}"
                for kind in (ActionKind.FORWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)
                if (kind, stage, microbatch) not in seen
            ]
            if missing:
                raise _schedule_error(
                    schedule,
                    f"rank {schedule.placement[stage]}",
                    f"{' and '.join(missing)} missing. Each stage needs F and B, or F, I and W, for each microbatch",
                )


def _check_action(schedule: Schedule, action: Action, rank: int, where: str) -> None:
    if action.kind not in COMPUTE_KINDS:
        raise _schedule_error(
            schedule, where, "a schedule has only compute actions (F, B, I, W); transfers are derived from them"
        )
    for what, value, limit in (
        ("stage", action.stage, schedule.num_stages),
        ("microbatch", action.microbatch, schedule.num_microbatches),
    ):
        if not 0 <= value < limit:
            raise _schedule_error(schedule, where, f"{what} {value} is not one of {limit} {what}s, 0 to {limit - 1}")
    owner = schedule.placement[action.stage]
    if owner != rank:
        raise _schedule_error(schedule, where, f"stage {action.stage} is on rank {owner}; it cannot be on two")


def _schedule_error(schedule: Schedule, where: str, why: str) -> ConfigError:
    return ConfigError(f"{schedule.name}, {where}: {why}.")


def _find_dependencies(action: Action, num_stages: int) -> list[_CompletedAction]:
    number = action.microbatch
    if action.kind is ActionKind.FORWARD:
        return [(ActionKind.FORWARD, action.stage - 1, number)] if action.stage else []
    if action.kind is ActionKind.BACKWARD_WEIGHT:
        return [(ActionKind.BACKWARD_INPUT, action.stage, number)]
    own = (ActionKind.FORWARD, action.stage, number)
    return [own] if action.stage == num_stages - 1 else [own, (ActionKind.BACKWARD_INPUT, action.stage + 1, number)]


def compute_timeline(
    schedule: Schedule, costs: Mapping[ActionKind, float] = UNIT_COSTS, *, stage_costs: Sequence[float] | None = None
) -> Timeline:
    """Return start and end of each action, if each starts as early as possible and communication takes no time.

    `costs` are the times of each kind of action, in the unit of the result; `stage_costs` are factors for each stage.

    Raises:
        ConfigError: the schedule deadlocks.
    """
    factors = stage_costs or [1.0] * schedule.num_stages
    ends: dict[_CompletedAction, float] = {}
    done: list[list[tuple[Action, float, float]]] = [[] for _ in range(schedule.num_ranks)]
    progress = True
    while progress:
        progress = False
        for times, order in zip(done, schedule.actions_by_rank, strict=True):
            for action in order[len(times) :]:
                needs = _find_dependencies(action, schedule.num_stages)
                if any(need not in ends for need in needs):
                    break
                start = max([times[-1][2] if times else 0.0, *(ends[need] for need in needs)])
                end = start + costs[action.kind] * factors[action.stage]
                gives = ActionKind.BACKWARD_INPUT if action.kind is ActionKind.BACKWARD else action.kind
                ends[gives, action.stage, action.microbatch] = end
                times.append((action, start, end))
                progress = True
    stuck = [
        f"rank {rank} waits at {order[len(times)]} for "
        + " and ".join(
            f"{stage}{kind}{microbatch}"
            for kind, stage, microbatch in _find_dependencies(order[len(times)], schedule.num_stages)
            if (kind, stage, microbatch) not in ends
        )
        for rank, (times, order) in enumerate(zip(done, schedule.actions_by_rank, strict=True))
        if len(times) < len(order)
    ]
    if stuck:
        raise ConfigError(
            f"{schedule.name} cannot finish: {'; '.join(stuck)}. Put each action after those that it depends on."
        )
    return tuple(tuple(times) for times in done)


def bubble_fraction(schedule: Schedule, *, stage_costs: Sequence[float] | None = None) -> float:
    """Return the fraction of all ranks' time, from the first start to the last end, spent waiting; from 0 to 1."""
    times = compute_timeline(schedule, stage_costs=stage_costs)
    busy = sum(end - start for rank in times for _, start, end in rank)
    return 1 - busy / (schedule.num_ranks * max(rank[-1][2] for rank in times if rank))


def count_peak_live_microbatches(schedule: Schedule) -> tuple[int, ...]:
    """Return for each rank the peak number of pairs (stage, microbatch) between forward and complete backward."""
    peaks = []
    for order in schedule.actions_by_rank:
        live = peak = 0
        for action in order:
            live += {ActionKind.FORWARD: 1, ActionKind.BACKWARD_INPUT: 0}.get(action.kind, -1)
            peak = max(peak, live)
        peaks.append(peak)
    return tuple(peaks)


def add_communication(schedule: Schedule) -> tuple[tuple[Action | P2PBatch, ...], ...]:
    """Return each rank's actions with the sends and receives inserted.

    The timelines of all ranks are merged. At the time at which an action ends, its result is sent and received, on both
    ranks. All transfers of two ranks at the same time form one exchange. The orders are thus projections of a single
    sequence of events, so they cannot deadlock, even if sends block, and both ranks list their transfers in the same
    order, as NCCL requires. No transfer of an exchange depends on another one, since computing takes time.
    """
    ends: dict[float, list[Action]] = {}
    starts: dict[float, list[tuple[int, Action]]] = {}
    for rank, times in enumerate(compute_timeline(schedule)):
        for action, start, end in times:
            starts.setdefault(start, []).append((rank, action))
            ends.setdefault(end, []).append(action)
    orders: list[list[Action | P2PBatch]] = [[] for _ in range(schedule.num_ranks)]
    for moment in sorted(starts.keys() | ends.keys()):
        # Actions that start at this time may need the results of those that end at it.
        for (low, high), transfers in _find_transfers(ends.get(moment, ()), schedule).items():
            orders[low].append(P2PBatch(high, tuple(transfers[low])))
            orders[high].append(P2PBatch(low, tuple(transfers[high])))
        for rank, action in starts.get(moment, ()):
            orders[rank].append(action)
    return tuple(tuple(order) for order in orders)


def _find_transfers(completed: Iterable[Action], schedule: Schedule) -> dict[tuple[int, int], dict[int, list[Action]]]:
    """Return, for each pair of ranks, the sends and receives of both for these actions' results, in equal order."""
    found: dict[tuple[int, int], dict[int, list[Action]]] = {}
    for action in completed:
        if action.kind is ActionKind.BACKWARD_WEIGHT:
            continue
        kinds = (
            (ActionKind.SEND_F, ActionKind.RECV_F)
            if action.kind is ActionKind.FORWARD
            else (ActionKind.SEND_B, ActionKind.RECV_B)
        )
        send = Action(kinds[0], action.stage, action.microbatch)
        if not 0 <= send.peer_stage < schedule.num_stages:
            continue
        here, there = schedule.placement[send.stage], schedule.placement[send.peer_stage]
        if here != there:
            both = found.setdefault((min(here, there), max(here, there)), {here: [], there: []})
            both[here].append(send)
            both[there].append(Action(kinds[1], send.peer_stage, send.microbatch))
    return found

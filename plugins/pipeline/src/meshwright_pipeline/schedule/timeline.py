"""When each action of a schedule starts and ends, and what follows from that: bubbles, live microbatches, transfers.

Times are those of a model in which communication takes none; nothing is measured here. Pure arithmetic, no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType

from meshwright.base.errors import ConfigError

from .order import Action, Exchange, Kind, Schedule, check_actions

UNIT_COSTS: Mapping[Kind, float] = MappingProxyType(
    {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.BACKWARD_INPUT: 1.0, Kind.BACKWARD_WEIGHT: 1.0}
)
"""Time of an action on one stage, in forwards. The papers' assumption."""

Times = tuple[tuple[tuple[Action, float, float], ...], ...]
"""For each rank, its actions with their start and end."""


_Done = tuple[Kind, int, int]
"""Something that is done: F, I (which a whole B counts as) or W, of a stage, for a microbatch."""


def _needs(action: Action, stages: int) -> list[_Done]:
    """What must be done before an action."""
    number = action.microbatch
    if action.kind is Kind.FORWARD:
        return [(Kind.FORWARD, action.stage - 1, number)] if action.stage else []
    if action.kind is Kind.BACKWARD_WEIGHT:
        return [(Kind.BACKWARD_INPUT, action.stage, number)]
    own = (Kind.FORWARD, action.stage, number)
    return [own] if action.stage == stages - 1 else [own, (Kind.BACKWARD_INPUT, action.stage + 1, number)]


def _gives(action: Action) -> Kind:
    return Kind.BACKWARD_INPUT if action.kind is Kind.BACKWARD else action.kind


def timeline(
    schedule: Schedule, costs: Mapping[Kind, float] = UNIT_COSTS, *, stage_costs: Sequence[float] | None = None
) -> Times:
    """When each action starts and ends, if each starts as soon as it can and communication takes no time.

    Args:
        costs: time of each kind of computing action, in any unit; the result is in the same.
        stage_costs: factor for each stage, where they differ; None: all 1.

    Raises:
        ConfigError: an action waits for another that can never come before it; named for each rank that is stuck.
    """
    factors = stage_costs or [1.0] * schedule.stages
    ends: dict[_Done, float] = {}
    done: list[list[tuple[Action, float, float]]] = [[] for _ in range(schedule.ranks)]
    progress = True
    while progress:
        progress = False
        for times, order in zip(done, schedule.orders, strict=True):
            for action in order[len(times) :]:
                needs = _needs(action, schedule.stages)
                if any(need not in ends for need in needs):
                    break
                start = max([times[-1][2] if times else 0.0, *(ends[need] for need in needs)])
                end = start + costs[action.kind] * factors[action.stage]
                ends[_gives(action), action.stage, action.microbatch] = end
                times.append((action, start, end))
                progress = True
    _check_finished(schedule, [len(times) for times in done], ends)
    return tuple(tuple(times) for times in done)


def _check_finished(schedule: Schedule, counts: Sequence[int], ends: Collection[_Done]) -> None:
    """Refuse a schedule that got stuck.

    Args:
        counts: for each rank, how many of its actions have run.
        ends: what they have done.
    """
    stuck = [
        f"rank {rank} waits at {order[count]} for "
        + " and ".join(
            f"{stage}{kind}{microbatch}"
            for kind, stage, microbatch in _needs(order[count], schedule.stages)
            if (kind, stage, microbatch) not in ends
        )
        for rank, (count, order) in enumerate(zip(counts, schedule.orders, strict=True))
        if count < len(order)
    ]
    if stuck:
        raise ConfigError(
            f"{schedule.name} cannot finish: {'; '.join(stuck)}. Put each action behind those that it needs."
        )


def bubble_fraction(
    schedule: Schedule, costs: Mapping[Kind, float] = UNIT_COSTS, *, stage_costs: Sequence[float] | None = None
) -> float:
    """The share of all ranks' time, from the first start to the last end, in which they wait: from 0 to 1.

    Args:
        costs, stage_costs: see `timeline`.

    Raises:
        ConfigError: the schedule cannot finish.
    """
    times = timeline(schedule, costs, stage_costs=stage_costs)
    busy = sum(end - start for rank in times for _, start, end in rank)
    return 1 - busy / (schedule.ranks * max(rank[-1][2] for rank in times if rank))


def peak_live(schedule: Schedule) -> tuple[int, ...]:
    """For each rank, the most (stage, microbatch) at once whose forward is done and whose backward is not; a
    backward in two parts is done with the second."""
    peaks = []
    for order in schedule.orders:
        live = peak = 0
        for action in order:
            live += {Kind.FORWARD: 1, Kind.BACKWARD_INPUT: 0}.get(action.kind, -1)
            peak = max(peak, live)
        peaks.append(peak)
    return tuple(peaks)


def validate(schedule: Schedule) -> None:
    """Check that each stage computes each microbatch once, forward and backward, in an order that can run.

    Raises:
        ConfigError: an action is unknown, doubled, forgotten or on the wrong rank, or the schedule cannot finish.
    """
    check_actions(schedule, lambda rank, index: f"action {index} of rank {rank}")
    timeline(schedule)


def with_communication(schedule: Schedule) -> tuple[tuple[Action | Exchange, ...], ...]:
    """Each rank's order with its sends and receives.

    All ranks are followed through time together, and what an action made for a stage on another rank is sent and
    received at that moment, on both sides; in one exchange with what else the two ranks have for each other then. So
    the orders are projections of one sequence in which each exchange is a single event: no rank can wait for another
    in a circle, not even if sends block, and two ranks name their transfers in the same order, as NCCL wants. Nothing
    in an exchange waits for the rest of it, since computing takes time.

    Raises:
        ConfigError: the schedule cannot finish.
    """
    ends: dict[float, list[Action]] = {}
    starts: dict[float, list[tuple[int, Action]]] = {}
    for rank, times in enumerate(timeline(schedule)):
        for action, start, end in times:
            starts.setdefault(start, []).append((rank, action))
            ends.setdefault(end, []).append(action)
    orders: list[list[Action | Exchange]] = [[] for _ in range(schedule.ranks)]
    for moment in sorted(starts.keys() | ends.keys()):
        # What ends at a moment comes before what starts then, and may need it.
        sends = [send for action in ends.get(moment, ()) for send in _sends(action, schedule)]
        for (low, high), transfers in _by_ranks(sends, schedule).items():
            orders[low].append(Exchange(high, tuple(transfers[low])))
            orders[high].append(Exchange(low, tuple(transfers[high])))
        for rank, action in starts.get(moment, ()):
            orders[rank].append(action)
    return tuple(tuple(order) for order in orders)


def _by_ranks(sends: Sequence[Action], schedule: Schedule) -> dict[tuple[int, int], dict[int, list[Action]]]:
    """By the two ranks between which they go, what each of the two does for these sends, in the same order."""
    found: dict[tuple[int, int], dict[int, list[Action]]] = {}
    for send in sends:
        here, there = schedule.placement[send.stage], schedule.placement[send.peer_stage]
        receive = Kind.RECV_F if send.kind is Kind.SEND_F else Kind.RECV_B
        both = found.setdefault((min(here, there), max(here, there)), {here: [], there: []})
        both[here].append(send)
        both[there].append(Action(receive, send.peer_stage, send.microbatch))
    return found


def _sends(action: Action, schedule: Schedule) -> Iterator[Action]:
    gives = _gives(action)
    if gives is Kind.BACKWARD_WEIGHT:
        return
    send = Action(Kind.SEND_F if gives is Kind.FORWARD else Kind.SEND_B, action.stage, action.microbatch)
    if 0 <= send.peer_stage < schedule.stages and schedule.placement[send.peer_stage] != schedule.placement[send.stage]:
        yield send

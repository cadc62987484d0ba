"""The order in which each rank of a pipeline computes, sends and receives. Pure arithmetic, no torch.

[Note: vocabulary] A *stage* is a run of consecutive blocks, a *rank* holds one or more stages, its *chunks*: chunk 0 is
the first of them in the model. A *looped* placement deals the stages out in turn (rank = stage % ranks); a *V* gives
rank r the stages r and 2 * ranks - 1 - r, so that both ends of the model are on rank 0. The backward of a stage is one
action (B), or two: the gradient of its input (I), for which the stage before waits, and that of its weights (W), for
which nothing waits and which can fill a bubble.

Sources: GPipe arXiv:1811.06965; 1F1B arXiv:2006.09503; interleaved 1F1B arXiv:2104.04473; LoopedBFS arXiv:2211.05953;
zero bubble arXiv:2401.10241; its V-shape arXiv:2405.15362; DualPipe arXiv:2412.19437, of which DualPipeV is one half,
folded. The orders are those of torch.distributed.pipelining wherever that has one; here each schedule takes any number
of microbatches.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType

from meshwright.base.errors import ConfigError, nearest


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

UNIT_COSTS: Mapping[Kind, float] = MappingProxyType(
    {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.BACKWARD_INPUT: 1.0, Kind.BACKWARD_WEIGHT: 1.0}
)
"""Time of an action on one stage, in forwards. The papers' assumption."""


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


# ---- the schedules, by name


def _one_forward_one_backward(
    forwards: Sequence[str], backwards: Sequence[str], *, warmup: int, weights_lag: int | None = None
) -> list[str]:
    """`warmup` forwards, then a forward before each backward while there are any.

    With `weights_lag`, backwards are of inputs only, and each from that one on is followed by the oldest W.
    """
    order = list(forwards[:warmup])
    coming = iter(forwards[warmup:])
    for index, backward in enumerate(backwards):
        order += [forward for forward in (next(coming, None),) if forward is not None]
        order.append(backward)
        if weights_lag is not None and index >= weights_lag:
            order.append("W")
    return order + ["W"] * min(weights_lag or 0, len(backwards))


def _chunk_by_chunk(rank: int, ranks: int, chunks: int, microbatches: int) -> list[str]:
    forwards = [f"F{chunk}" for chunk in range(chunks) for _ in range(microbatches)]
    return forwards + [f"B{chunk}" for chunk in reversed(range(chunks)) for _ in range(microbatches)]


def _interleaved(ranks: int, chunks: int, microbatches: int) -> tuple[list[int], list[int], int]:
    """The chunks of all forwards and of all backwards, and the forwards that the last rank does in advance.

    Microbatches go in rounds of about one per rank: each round passes all chunks before the next begins. The larger
    rounds come first, else a rank would have to begin a backward before it has done enough forwards for it.
    """
    rounds = max(1, microbatches // ranks)
    sizes = [microbatches // rounds + (index < microbatches % rounds) for index in range(rounds)]
    forwards = [chunk for size in sizes for chunk in range(chunks) for _ in range(size)]
    return forwards, [chunks - 1 - chunk for chunk in forwards], (chunks - 1) * sizes[0]


def _interleaved_1f1b(rank: int, ranks: int, chunks: int, microbatches: int) -> list[str]:
    forwards, backwards, ahead = _interleaved(ranks, chunks, microbatches)
    # With one chunk a rank is idle after its warm-up either way, so it holds fewer activations with half the lead.
    lead = (1 if chunks == 1 else 2) * (ranks - 1 - rank)
    return _one_forward_one_backward(
        [f"F{chunk}" for chunk in forwards], [f"B{chunk}" for chunk in backwards], warmup=ahead + lead
    )


def _interleaved_zero_bubble(rank: int, ranks: int, chunks: int, microbatches: int) -> list[str]:
    forwards, backwards, ahead = _interleaved(ranks, chunks, microbatches)
    # A later rank puts off more weights: all ranks then hold as much as rank 0, whose lead is the longest.
    return _one_forward_one_backward(
        [f"F{chunk}" for chunk in forwards],
        [f"I{chunk}" for chunk in backwards],
        warmup=ahead + ranks - 1 - rank,
        weights_lag=rank,
    )


def _zero_bubble_v(rank: int, ranks: int, chunks: int, microbatches: int) -> list[str]:
    below = ranks - 1 - rank  # ranks between this one and the turn of the V
    count = max(microbatches, 2 * ranks - 1)
    return [
        *["F0"] * (2 * below + 1),
        *["F1", "F0"] * rank,
        *["F1", "I1", "W1"] * (below + 1),
        *["F0", "I0", "W0", "F1", "I1", "W1"] * (count - 2 * ranks + 1 + rank),
        *["I0", "W0", "F1", "I1", "W1"] * below,
        *["I0", "I1"] * rank,
        *["I0", "W0"] * (below + 1),
        *["W1"] * rank,
        *["W0"] * rank,
    ]


def _dual_pipe_v(rank: int, ranks: int, chunks: int, microbatches: int) -> list[str]:
    below = ranks - 1 - rank
    count = max(microbatches, 2 * ranks)
    return [
        *["F0"] * (2 * below),
        *["F0", "F1"] * (rank + 1),
        *["I1", "W", "F1"] * below,
        *["F0", "B1", "F1", "B0"] * (count - 2 * ranks + rank + 1),
        *["B1", "F1", "B0"] * below,
        # Of the backwards that have no forward beside them, the second half leaves its weights for the end.
        *(["B1", "B0"] * (rank + 1))[: rank + 1],
        *(["I1", "I0"] * (rank + 1))[rank + 1 :],
        *["W", "I0"] * below,
        *["W"] * (rank + 1),
    ]


@dataclass(frozen=True, slots=True)
class ScheduleRule:
    """What a schedule asks of the stages, and the order of a rank."""

    name: str
    order: Callable[[int, int, int, int], list[str]]
    """(rank, ranks, chunks, microbatches) to the rank's slots: "F0" is the next forward of chunk 0, "W" the oldest
    weight gradient that waits. Slots of microbatches beyond the last are left out."""
    min_chunks: int
    max_chunks: int | None
    last_first: bool = False
    """Backward takes the microbatches from the last to the first."""
    v_shaped: bool = False

    @property
    def chunks_allowed(self) -> str:
        """In words, for errors."""
        if self.max_chunks is None:
            return f"{self.min_chunks} or more stages"
        return "exactly one stage" if self.max_chunks == 1 else f"exactly {self.max_chunks} stages"


SCHEDULES: Mapping[str, ScheduleRule] = MappingProxyType(
    {
        rule.name: rule
        for rule in (
            ScheduleRule("GPipe", _chunk_by_chunk, 1, 1),
            ScheduleRule("1F1B", _interleaved_1f1b, 1, 1),
            ScheduleRule("Interleaved1F1B", _interleaved_1f1b, 2, None),
            ScheduleRule("LoopedBFS", _chunk_by_chunk, 2, None, last_first=True),
            ScheduleRule("InterleavedZeroBubble", _interleaved_zero_bubble, 2, None),
            ScheduleRule("ZBVZeroBubble", _zero_bubble_v, 2, 2, v_shaped=True),
            ScheduleRule("DualPipeV", _dual_pipe_v, 2, 2, v_shaped=True),
        )
    }
)

# Further spellings, lower case, without separators.
_ALIASES = {
    "interleaved": "Interleaved1F1B",
    "bfs": "LoopedBFS",
    "breadthfirst": "LoopedBFS",
    "interleavedzb": "InterleavedZeroBubble",
    "zb1p": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "zerobubblev": "ZBVZeroBubble",
}


def schedule_rule(name: str) -> ScheduleRule:
    """The rule of a schedule, by its name in any case, with or without separators and torch's "Schedule" before it.

    Raises:
        ConfigError: there is no such schedule.
    """
    plain = re.sub(r"[\s_-]", "", name).lower().removeprefix("schedule")
    known = {each.lower(): each for each in SCHEDULES} | _ALIASES
    if plain not in known:
        close = nearest(plain, known).replace(f"'{plain}'", "")
        raise ConfigError(f"pp_schedule={name!r} is unknown.{close} Allowed, in any case: {', '.join(SCHEDULES)}.")
    return SCHEDULES[known[plain]]


def build_schedule(name: str, *, ranks: int, stages: int, microbatches: int) -> Schedule:
    """The order of each rank under a schedule.

    Args:
        name: see `schedule_rule`.
        ranks: size of the pipeline axis.
        stages: of the whole model; as many on each rank.
        microbatches: of one run of the schedule.

    Raises:
        ConfigError: the name is unknown, or the schedule does not take this number of stages or microbatches.
    """
    rule = schedule_rule(name)
    for what, value in (("ranks", ranks), ("microbatches", microbatches)):
        if value < 1:
            raise ConfigError(f"{rule.name}: {what}={value} must be 1 or more.")
    chunks, left = divmod(stages, ranks)
    if left or chunks < rule.min_chunks or (rule.max_chunks and chunks > rule.max_chunks):
        wanted = ranks * min(max(chunks, rule.min_chunks), rule.max_chunks or chunks + rule.min_chunks)
        raise ConfigError(
            f"{rule.name} takes {rule.chunks_allowed} on each rank, but {stages} stages on {ranks} ranks are "
            f"{f'{stages / ranks:.3g}'} each. Split the model into {wanted} stages, or choose another schedule."
        )
    placement = tuple(min(stage, stages - 1 - stage) if rule.v_shaped else stage % ranks for stage in range(stages))
    schedule = Schedule(rule.name, ranks, stages, microbatches, placement, ())
    orders = tuple(
        tuple(_numbered(rule, rule.order(rank, ranks, chunks, microbatches), schedule.stages_of(rank), microbatches))
        for rank in range(ranks)
    )
    return Schedule(rule.name, ranks, stages, microbatches, placement, orders)


def _numbered(rule: ScheduleRule, slots: Iterable[str], stages: Sequence[int], microbatches: int) -> Iterator[Action]:
    """The actions of a rank's slots: the n-th slot of a kind and chunk is for microbatch n."""
    seen: Counter[str] = Counter()
    waiting: list[Action] = []
    for slot in slots:
        kind = Kind(slot[0])
        if kind is Kind.BACKWARD_WEIGHT:
            of_input = next(each for each in waiting if slot == "W" or each.stage == stages[int(slot[1:])])
            waiting.remove(of_input)
            action = Action(kind, of_input.stage, of_input.microbatch)
        else:
            number = seen[slot.replace("I", "B")]
            seen[slot.replace("I", "B")] += 1
            if rule.last_first and kind is Kind.BACKWARD:
                number = microbatches - 1 - number
            action = Action(kind, stages[int(slot[1:])], number)
            if kind is Kind.BACKWARD_INPUT:
                waiting.append(action)
        if action.microbatch < microbatches:
            yield action


# ---- dependencies and time


def _needs(action: Action, stages: int) -> list[tuple[Kind, int]]:
    """What must be done for the same microbatch before an action: F or I (which a whole B counts as) of a stage."""
    if action.kind is Kind.FORWARD:
        return [(Kind.FORWARD, action.stage - 1)] if action.stage else []
    if action.kind is Kind.BACKWARD_WEIGHT:
        return [(Kind.BACKWARD_INPUT, action.stage)]
    own = (Kind.FORWARD, action.stage)
    return [own] if action.stage == stages - 1 else [own, (Kind.BACKWARD_INPUT, action.stage + 1)]


def _gives(action: Action) -> Kind:
    return Kind.BACKWARD_INPUT if action.kind is Kind.BACKWARD else action.kind


Times = tuple[tuple[tuple[Action, float, float], ...], ...]
"""For each rank, its actions with their start and end."""


def timeline(
    schedule: Schedule, costs: Mapping[Kind, float] = UNIT_COSTS, *, stage_costs: Sequence[float] | None = None
) -> Times:
    """When each action starts and ends, if each starts as soon as it can and communication takes no time.

    Args:
        costs: time of each kind of computing action.
        stage_costs: factor for each stage, where they differ; None: all 1.

    Raises:
        ConfigError: an action waits for another that can never come before it; named for each rank that is stuck.
    """
    factors = stage_costs or [1.0] * schedule.stages
    ends: dict[tuple[Kind, int, int], float] = {}
    done: list[list[tuple[Action, float, float]]] = [[] for _ in range(schedule.ranks)]
    progress = True
    while progress:
        progress = False
        for times, order in zip(done, schedule.orders, strict=True):
            for action in order[len(times) :]:
                needs = [(kind, stage, action.microbatch) for kind, stage in _needs(action, schedule.stages)]
                if any(need not in ends for need in needs):
                    break
                start = max([times[-1][2] if times else 0.0, *(ends[need] for need in needs)])
                end = start + costs[action.kind] * factors[action.stage]
                ends[_gives(action), action.stage, action.microbatch] = end
                times.append((action, start, end))
                progress = True
    stuck = [
        f"rank {rank} waits at {order[len(times)]} for "
        + " and ".join(
            f"{stage}{kind}{microbatch}"
            for kind, stage in _needs(order[len(times)], schedule.stages)
            if (kind, stage, microbatch := order[len(times)].microbatch) not in ends
        )
        for rank, (times, order) in enumerate(zip(done, schedule.orders, strict=True))
        if len(times) < len(order)
    ]
    if stuck:
        raise ConfigError(
            f"{schedule.name} cannot finish: {'; '.join(stuck)}. Put each action behind those that it needs."
        )
    return tuple(tuple(times) for times in done)


def bubble_fraction(
    schedule: Schedule, costs: Mapping[Kind, float] = UNIT_COSTS, *, stage_costs: Sequence[float] | None = None
) -> float:
    """The share of all ranks' time, from the first start to the last end, in which they wait."""
    times = timeline(schedule, costs, stage_costs=stage_costs)
    busy = sum(end - start for rank in times for _, start, end in rank)
    return 1 - busy / (schedule.ranks * max(rank[-1][2] for rank in times if rank))


def peak_live(schedule: Schedule) -> tuple[int, ...]:
    """For each rank, the most (stage, microbatch) at once whose forward is done and whose backward is not."""
    peaks = []
    for order in schedule.orders:
        live = peak = 0
        for action in order:
            live += {Kind.FORWARD: 1, Kind.BACKWARD_INPUT: 0}.get(action.kind, -1)
            peak = max(peak, live)
        peaks.append(peak)
    return tuple(peaks)


# ---- communication


def with_communication(schedule: Schedule) -> tuple[tuple[Action, ...], ...]:
    """Each rank's order with its sends and receives.

    All ranks are followed through time together, and what an action made for a stage on another rank is sent and
    received at that moment, on both sides. So the orders are projections of one sequence in which each transfer is
    a single event: no rank can wait for another in a circle, not even if sends block, and two ranks name their
    transfers in the same order, as NCCL wants.

    Raises:
        ConfigError: the schedule cannot finish.
    """
    events: list[tuple[float, bool, int, Action]] = []
    for rank, times in enumerate(timeline(schedule)):
        for action, start, end in times:
            events += [(start, True, rank, action), (end, False, rank, action)]
    orders: list[list[Action]] = [[] for _ in range(schedule.ranks)]
    # What ends at a moment comes before what starts then, and may need it.
    for _, starts, rank, action in sorted(events, key=lambda event: event[:3]):
        if starts:
            orders[rank].append(action)
            continue
        for send in _sends(action, schedule):
            receive = Kind.RECV_F if send.kind is Kind.SEND_F else Kind.RECV_B
            orders[rank].append(send)
            orders[schedule.placement[send.peer_stage]].append(Action(receive, send.peer_stage, send.microbatch))
    return tuple(tuple(order) for order in orders)


def _sends(action: Action, schedule: Schedule) -> Iterator[Action]:
    gives = _gives(action)
    if gives is Kind.BACKWARD_WEIGHT:
        return
    send = Action(Kind.SEND_F if gives is Kind.FORWARD else Kind.SEND_B, action.stage, action.microbatch)
    if 0 <= send.peer_stage < schedule.stages and schedule.placement[send.peer_stage] != schedule.placement[send.stage]:
        yield send


# ---- schedules from a file


def validate(schedule: Schedule) -> None:
    """Check that each stage computes each microbatch once, forward and backward, in an order that can run.

    Raises:
        ConfigError: an action is unknown, doubled, forgotten or on the wrong rank, or the schedule cannot finish.
    """
    _check_actions(schedule, lambda rank, index: f"action {index} of rank {rank}")


def _check_actions(schedule: Schedule, place: Callable[[int, int], str]) -> None:
    seen: dict[tuple[Kind, int, int], str] = {}

    def refuse(where: str, why: str) -> ConfigError:
        return ConfigError(f"{schedule.name}, {where}: {why}.")

    for rank, order in enumerate(schedule.orders):
        for index, action in enumerate(order):
            where = f"{place(rank, index)} ({action})"
            if action.kind not in COMPUTE:
                raise refuse(where, "a schedule holds computing actions only (F, B, I, W); transfers are derived")
            for what, value, limit in (
                ("stage", action.stage, schedule.stages),
                ("microbatch", action.microbatch, schedule.microbatches),
            ):
                if not 0 <= value < limit:
                    raise refuse(where, f"{what} {value} is not among the {limit} {what}s, 0 to {limit - 1}")
            if schedule.placement[action.stage] != rank:
                raise refuse(
                    where, f"stage {action.stage} is on rank {schedule.placement[action.stage]}; it cannot be on two"
                )
            # A whole backward stands for both of its parts.
            parts = [Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT] if action.kind is Kind.BACKWARD else [action.kind]
            for key in [(part, action.stage, action.microbatch) for part in parts]:
                if key in seen:
                    raise refuse(where, f"this was computed already by {seen[key]}. Leave one of them out")
            seen |= {(part, action.stage, action.microbatch): where for part in parts}
    for stage in range(schedule.stages):
        for microbatch in range(schedule.microbatches):
            missing = [
                str(Action(kind, stage, microbatch))
                for kind in (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
                if (kind, stage, microbatch) not in seen
            ]
            if missing:
                raise refuse(
                    f"rank {schedule.placement[stage]}",
                    f"{' and '.join(missing)} missing. Each stage needs F and B, or F, I and W, of each microbatch",
                )
    timeline(schedule)


_CELL = re.compile(r"(\d+)([A-Z_]+)(\d+)")
_OVERLAP = re.compile(r"\((.*)\)OVERLAP_F_B")


def read_csv(path: str | Path, *, ranks: int, stages: int, microbatches: int) -> Schedule:
    """Read a schedule from a file, one row per rank, in the compute-only format of torch's pipelining.

    A cell is an action such as `0F0` or `1I2`; empty cells are bubbles, which follow from the order here; a pair such
    as `(0F1;3B0)OVERLAP_F_B` runs one after the other. Each stage is on the rank that its actions are on.

    Raises:
        ConfigError: the file cannot be read, or its schedule cannot run; with row and cell, both from 1.
    """
    name = _csv_name(path)
    rows = _csv_rows(path)
    if len(rows) != ranks:
        raise ConfigError(f"{name} has {len(rows)} rows, but pp_size={ranks}. Give one row for each rank.")
    owner = {action.stage: rank for rank in reversed(range(ranks)) for action, _ in rows[rank]}
    without = [str(stage) for stage in range(stages) if stage not in owner]
    if without:
        raise ConfigError(f"{name} holds nothing for stage {', '.join(without)} of {stages}. Add its actions.")
    orders = tuple(tuple(action for action, _ in row) for row in rows)
    schedule = Schedule(name, ranks, stages, microbatches, tuple(owner[stage] for stage in range(stages)), orders)
    _check_actions(schedule, lambda rank, index: f"row {rank + 1}, cell {rows[rank][index][1]}")
    return schedule


def stages_in_csv(path: str | Path) -> int:
    """How many stages the actions of a file name.

    Raises:
        ConfigError: the file cannot be read, or holds no action.
    """
    return 1 + max(action.stage for action in _csv_actions(path))


def microbatches_in_csv(path: str | Path) -> int:
    """How many microbatches the actions of a file name.

    Raises:
        ConfigError: the file cannot be read, or holds no action.
    """
    return 1 + max(action.microbatch for action in _csv_actions(path))


def _csv_actions(path: str | Path) -> list[Action]:
    found = [action for row in _csv_rows(path) for action, _ in row]
    if not found:
        raise ConfigError(f"{_csv_name(path)} holds no action. Write a row for each rank, with cells such as '0F0'.")
    return found


def _csv_name(path: str | Path) -> str:
    return f"pp_schedule_csv={str(path)!r}"


def _csv_rows(path: str | Path) -> list[list[tuple[Action, int]]]:
    """The actions of each row, each with the number of its cell."""
    try:
        with Path(path).open(newline="", encoding="utf-8") as file:
            rows = [row for row in csv.reader(file) if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{_csv_name(path)} cannot be read: {error}.") from None
    return [
        [
            (action, column)
            for column, cell in enumerate(row, 1)
            for action in _cell_actions(cell, f"{_csv_name(path)}, row {number}, cell {column}")
        ]
        for number, row in enumerate(rows, 1)
    ]


def _cell_actions(cell: str, where: str) -> Iterator[Action]:
    pair = _OVERLAP.fullmatch(cell.strip())
    for text in pair[1].split(";") if pair else [cell]:
        if not text.strip():
            continue
        match = _CELL.fullmatch(text.strip())
        if not match or match[2] not in list(Kind):
            raise ConfigError(
                f"{where}: {cell!r} is no action. Write stage, kind and microbatch, such as '0F0'; kinds are F, B "
                "(or I and W)."
            )
        yield Action(Kind(match[2]), int(match[1]), int(match[3]))

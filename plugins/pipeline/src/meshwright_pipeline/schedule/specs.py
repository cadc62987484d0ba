"""Built-in schedules, and schedules from files. Imports no torch.

For terms see [Note: vocabulary] in `actions`.

Sources: GPipe arXiv:1811.06965; 1F1B arXiv:2006.09503; interleaved 1F1B arXiv:2104.04473; LoopedBFS arXiv:2211.05953;
zero bubble arXiv:2401.10241; its V-shape arXiv:2405.15362; DualPipe arXiv:2412.19437, of which DualPipeV is one half,
folded. Orders equal those of torch.distributed.pipelining, where it supports the sizes; here each schedule supports any
number of microbatches.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from meshwright.plugin import ConfigError, suggest_match

from .actions import Action, ActionKind, Schedule, check_actions, compute_timeline


def _one_forward_one_backward(
    forwards: Sequence[str], backwards: Sequence[str], *, num_warmup_forwards: int, wgrad_lag: int | None = None
) -> list[str]:
    """Return slots of `num_warmup_forwards` forwards, then one forward before each backward.

    With `wgrad_lag`, the oldest W follows each backward after the first `wgrad_lag`."""
    order = list(forwards[:num_warmup_forwards])
    coming = iter(forwards[num_warmup_forwards:])
    for index, backward in enumerate(backwards):
        order += [forward for forward in (next(coming, None),) if forward is not None]
        order.append(backward)
        if wgrad_lag is not None and index >= wgrad_lag:
            order.append("W")
    return order + ["W"] * min(wgrad_lag or 0, len(backwards))


def _chunk_by_chunk(rank: int, ranks: int, chunks: int, microbatches: int) -> list[str]:
    forwards = [f"F{chunk}" for chunk in range(chunks) for _ in range(microbatches)]
    return forwards + [f"B{chunk}" for chunk in reversed(range(chunks)) for _ in range(microbatches)]


def _interleave_chunks(ranks: int, chunks: int, microbatches: int) -> tuple[list[int], list[int], int]:
    """Return the chunks of all forwards and all backwards, and the number of warm-up forwards of the last rank.

    Microbatches are grouped in rounds of about one per rank; each round passes all chunks before the next begins. The
    larger rounds come first, since otherwise a rank would have to begin a backward before enough forwards are done.
    """
    rounds = max(1, microbatches // ranks)
    sizes = [microbatches // rounds + (index < microbatches % rounds) for index in range(rounds)]
    forwards = [chunk for size in sizes for chunk in range(chunks) for _ in range(size)]
    return forwards, [chunks - 1 - chunk for chunk in forwards], (chunks - 1) * sizes[0]


def _interleaved_1f1b(rank: int, ranks: int, chunks: int, microbatches: int) -> list[str]:
    forwards, backwards, ahead = _interleave_chunks(ranks, chunks, microbatches)
    # With one chunk, a rank is idle after its warm-up either way, and half the lead needs fewer activations.
    lead = (1 if chunks == 1 else 2) * (ranks - 1 - rank)
    return _one_forward_one_backward(
        [f"F{chunk}" for chunk in forwards], [f"B{chunk}" for chunk in backwards], num_warmup_forwards=ahead + lead
    )


def _interleaved_zero_bubble(rank: int, ranks: int, chunks: int, microbatches: int) -> list[str]:
    forwards, backwards, ahead = _interleave_chunks(ranks, chunks, microbatches)
    # Later ranks defer more weight gradients, so that all ranks hold as much as rank 0, whose lead is longest.
    return _one_forward_one_backward(
        [f"F{chunk}" for chunk in forwards],
        [f"I{chunk}" for chunk in backwards],
        num_warmup_forwards=ahead + ranks - 1 - rank,
        wgrad_lag=rank,
    )


def _zero_bubble_v(rank: int, ranks: int, chunks: int, microbatches: int) -> list[str]:
    below = ranks - 1 - rank  # Ranks between this one and the turn of the V
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
        # Of the backwards without a paired forward, the second half defers its weight gradients to the end.
        *(["B1", "B0"] * (rank + 1))[: rank + 1],
        *(["I1", "I0"] * (rank + 1))[rank + 1 :],
        *["W", "I0"] * below,
        *["W"] * (rank + 1),
    ]


@dataclass(frozen=True, slots=True)
class ScheduleSpec:
    """Requirements of a schedule, and the order of actions of a rank."""

    name: str
    build_order: Callable[[int, int, int, int], list[str]]
    """Maps (rank, ranks, chunks, microbatches) to the rank's slots: "F0" is the next forward of chunk 0, "W" the oldest
    pending weight gradient. Slots of microbatches after the last one are skipped."""
    min_chunks: int
    max_chunks: int | None
    reverses_backward: bool = False
    """Whether backwards run from the last microbatch to the first."""
    is_v_shaped: bool = False
    steady_state: Callable[[int], tuple[int, int]] = lambda ranks: (3, 1)
    """Maps the number of ranks to (least, step): from `least` microbatches on, each further `step` microbatches add the
    same actions at the same position of each rank's order."""

    @property
    def describe_chunks(self) -> str:
        if self.max_chunks is None:
            return f"{self.min_chunks} or more stages"
        return "exactly one stage" if self.max_chunks == 1 else f"exactly {self.max_chunks} stages"


SCHEDULES: Mapping[str, ScheduleSpec] = MappingProxyType(
    {
        rule.name: rule
        for rule in (
            ScheduleSpec("GPipe", _chunk_by_chunk, 1, 1),
            ScheduleSpec("1F1B", _interleaved_1f1b, 1, 1, steady_state=lambda ranks: (ranks + 1, 1)),
            ScheduleSpec("Interleaved1F1B", _interleaved_1f1b, 2, None, steady_state=lambda ranks: (3 * ranks, ranks)),
            ScheduleSpec("LoopedBFS", _chunk_by_chunk, 2, None, reverses_backward=True),
            ScheduleSpec(
                "InterleavedZeroBubble",
                _interleaved_zero_bubble,
                2,
                None,
                steady_state=lambda ranks: (3 * ranks, ranks),
            ),
            ScheduleSpec(
                "ZBVZeroBubble", _zero_bubble_v, 2, 2, is_v_shaped=True, steady_state=lambda ranks: (2 * ranks + 1, 1)
            ),
            ScheduleSpec(
                "DualPipeV", _dual_pipe_v, 2, 2, is_v_shaped=True, steady_state=lambda ranks: (2 * ranks + 1, 1)
            ),
        )
    }
)

# Other spellings, in lower case without separators.
_ALIASES = {
    "interleaved": "Interleaved1F1B",
    "bfs": "LoopedBFS",
    "breadthfirst": "LoopedBFS",
    "interleavedzb": "InterleavedZeroBubble",
    "zb1p": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "zerobubblev": "ZBVZeroBubble",
}


def find_schedule_spec(name: str) -> ScheduleSpec:
    """Return a schedule by its name, in any case, with or without separators and torch's prefix "Schedule"."""
    plain = re.sub(r"[\s_-]", "", name).lower().removeprefix("schedule")
    known = {each.lower(): each for each in SCHEDULES} | _ALIASES
    if plain not in known:
        close = suggest_match(plain, known).replace(f"'{plain}'", "")
        raise ConfigError(f"pp_schedule={name!r} is unknown.{close} Allowed, in any case: {', '.join(SCHEDULES)}.")
    return SCHEDULES[known[plain]]


def build_schedule(name: str, *, num_ranks: int, num_stages: int, num_microbatches: int) -> Schedule:
    """Build a schedule by name; each rank has an equal number of the `num_stages`."""
    rule = find_schedule_spec(name)
    for what, value in (("ranks", num_ranks), ("microbatches", num_microbatches)):
        if value < 1:
            raise ConfigError(f"{rule.name}: {what}={value} must be 1 or more.")
    chunks, left = divmod(num_stages, num_ranks)
    if left or chunks < rule.min_chunks or (rule.max_chunks and chunks > rule.max_chunks):
        wanted = num_ranks * min(max(chunks, rule.min_chunks), rule.max_chunks or chunks + rule.min_chunks)
        raise ConfigError(
            f"{rule.name} needs {rule.describe_chunks} on each rank, but {num_stages} stages on {num_ranks} ranks are "
            f"{f'{num_stages / num_ranks:.3g}'} each. Split the model into {wanted} stages, or choose another schedule."
        )
    placement = tuple(
        min(stage, num_stages - 1 - stage) if rule.is_v_shaped else stage % num_ranks for stage in range(num_stages)
    )
    schedule = Schedule(rule.name, num_ranks, num_stages, num_microbatches, placement, ())
    orders = tuple(
        tuple(
            _number_microbatches(
                rule,
                rule.build_order(rank, num_ranks, chunks, num_microbatches),
                schedule.stages_on_rank(rank),
                num_microbatches,
            )
        )
        for rank in range(num_ranks)
    )
    return replace(schedule, actions_by_rank=orders)


def _number_microbatches(
    rule: ScheduleSpec, slots: Iterable[str], stages: Sequence[int], microbatches: int
) -> Iterator[Action]:
    """Yield the actions of a rank's slots. The n-th slot of a kind and chunk is for microbatch n."""
    seen: Counter[str] = Counter()
    waiting: list[Action] = []
    for slot in slots:
        kind = ActionKind(slot[0])
        if kind is ActionKind.BACKWARD_WEIGHT:
            of_input = next(each for each in waiting if slot == "W" or each.stage == stages[int(slot[1:])])
            waiting.remove(of_input)
            action = Action(kind, of_input.stage, of_input.microbatch)
        else:
            number = seen[slot.replace("I", "B")]
            seen[slot.replace("I", "B")] += 1
            if rule.reverses_backward and kind is ActionKind.BACKWARD:
                number = microbatches - 1 - number
            action = Action(kind, stages[int(slot[1:])], number)
            if kind is ActionKind.BACKWARD_INPUT:
                waiting.append(action)
        if action.microbatch < microbatches:
            yield action


# -- custom schedules, in the compute-only format of torch.distributed.pipelining

_CELL = re.compile(r"(\d+)([A-Z_]+)(\d+)")
_OVERLAP = re.compile(r"\((.*)\)OVERLAP_F_B")


def read_schedule_csv(path: str | Path, *, num_ranks: int, num_stages: int, num_microbatches: int) -> Schedule:
    """Read a schedule from a CSV file with one row per rank. Errors name row and cell, both counted from 1.

    A cell is an action such as `0F0` or `1I2`. Empty cells are ignored, since bubbles follow from the order. The two
    actions of a pair such as `(0F1;3B0)OVERLAP_F_B` run in sequence. A stage is on the rank whose row has its actions.
    """
    name = _describe_csv(path)
    rows = _read_csv_rows(path)
    if len(rows) != num_ranks:
        raise ConfigError(f"{name} has {len(rows)} rows, but pp_size={num_ranks}. Write one row for each rank.")
    owner = {action.stage: rank for rank in reversed(range(num_ranks)) for action, _ in rows[rank]}
    without = [str(stage) for stage in range(num_stages) if stage not in owner]
    if without:
        raise ConfigError(f"{name} has no action of stage {', '.join(without)} of {num_stages}. Add its actions.")
    orders = tuple(tuple(action for action, _ in row) for row in rows)
    schedule = Schedule(
        name, num_ranks, num_stages, num_microbatches, tuple(owner[stage] for stage in range(num_stages)), orders
    )
    check_actions(schedule, lambda rank, index: f"row {rank + 1}, cell {rows[rank][index][1]}")
    compute_timeline(schedule)
    return schedule


def read_schedule_size(path: str | Path) -> tuple[int, int]:
    """Return the number of stages and of microbatches in a file."""
    found = [action for row in _read_csv_rows(path) for action, _ in row]
    if not found:
        raise ConfigError(f"{_describe_csv(path)} has no action. Write a row for each rank, with cells such as '0F0'.")
    return 1 + max(action.stage for action in found), 1 + max(action.microbatch for action in found)


def _describe_csv(path: str | Path) -> str:
    return f"pp_schedule_csv={str(path)!r}"


def _read_csv_rows(path: str | Path) -> list[list[tuple[Action, int]]]:
    """Return the actions of each row with the numbers of their cells."""
    try:
        with Path(path).open(newline="", encoding="utf-8") as file:
            rows = [row for row in csv.reader(file) if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{_describe_csv(path)} cannot be read: {error}.") from None
    return [
        [
            (action, column)
            for column, cell in enumerate(row, 1)
            for action in _parse_cell(cell, f"{_describe_csv(path)}, row {number}, cell {column}")
        ]
        for number, row in enumerate(rows, 1)
    ]


def _parse_cell(cell: str, where: str) -> Iterator[Action]:
    pair = _OVERLAP.fullmatch(cell.strip())
    for text in pair[1].split(";") if pair else [cell]:
        if not text.strip():
            continue
        match = _CELL.fullmatch(text.strip())
        if not match or match[2] not in list(ActionKind):
            raise ConfigError(
                f"{where}: {cell!r} is not an action. Write stage, kind and microbatch, such as '0F0'; kinds are F, B "
                "(or I and W)."
            )
        yield Action(ActionKind(match[2]), int(match[1]), int(match[3]))

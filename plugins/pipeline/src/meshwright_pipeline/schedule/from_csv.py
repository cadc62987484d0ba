"""A schedule of the user's own, from a file in the compute-only format of torch's pipelining. No torch.

Reading and refusing alone; what an order must hold is said in `order`, and whether it can finish in `timeline`.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from pathlib import Path

from meshwright.base.errors import ConfigError

from .order import Action, Kind, Schedule, check_actions
from .timeline import timeline

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
    check_actions(schedule, lambda rank, index: f"row {rank + 1}, cell {rows[rank][index][1]}")
    timeline(schedule)
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

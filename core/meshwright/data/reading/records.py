"""The examples of a source before they are tokenized: objects whose columns are numbers, and the place of each."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ...base.errors import DataError, nearest
from ..config import FIELDS, SourceConfig
from ..progress import Meter
from .readers import Cells
from .sources import FoundSource, find_source


@dataclass(frozen=True, slots=True)
class Record:
    """An example.

    Attributes:
        value: its fields, as the source names them.
        where: for errors: "chats.jsonl:17", "a.parquet:row 3", "owner/name[train]:5".
    """

    value: dict[str, Any]
    where: str


def read_records(source: SourceConfig | FoundSource, start: int = 0, *, meter: Meter | None = None) -> Iterator[Record]:
    """Read the examples of a source in their order; what is no text at all is left out.

    Args:
        source: where they are.
        start: so many are passed over, which were read before.
        meter: is told how far the source has been read.

    Raises:
        DataError: the source cannot be read, or holds what is no object, or a column that is no number; it names file
            and line.
    """
    found = source if isinstance(source, FoundSource) else find_source(source)
    records = (record_of(value, where, found.config) for value, where in found.values(meter or Meter()))
    return islice((record for record in records if not _is_empty(record, found.config)), start, None)


def record_of(value: Any, where: str, config: SourceConfig) -> Record:
    """The record that a value of a source is.

    Raises:
        DataError: it is no object, or has no number where a column is to be.
    """
    if not isinstance(value, dict):
        raise DataError(
            f"{where}: holds a JSON {type(value).__name__}. Each example must be one object, such as "
            f'{{"{theirs(FIELDS[config.format][0], config)}": ...}}.'
        )
    if config.columns:
        value = {**value, **{theirs(name, config): _column(value, name, where, config) for name in config.columns}}
    return Record(value, where)


def theirs(name: str, config: SourceConfig) -> str:
    """What a source calls a field of ours."""
    return config.fields.get(name, name)


def _is_empty(record: Record, config: SourceConfig) -> bool:
    return config.format == "text" and record.value.get(theirs("text", config)) == ""


def _column(value: dict[str, Any], name: str, where: str, config: SourceConfig) -> Any:
    field = theirs(name, config)
    if field not in value:
        there = ", ".join(sorted(map(str, value))) or "none"
        raise DataError(
            f"{where}: no field {field!r}, which is to be a column. Fields that are there: {there}."
            f"{nearest(field, map(str, value))} Name the one that holds it, with fields: {{{name}: ...}}."
        )
    column: Any = _number_in(value[field]) if isinstance(value, Cells) else value[field]
    # One for each token where the tokens are given, or for each of a pair.
    several = isinstance(column, list) and config.format in ("tokens", "preference")
    for each in column if several else [column]:
        _check_number(each, field, where)
    return column


def _number_in(cell: str) -> int | float | str:
    """The number that a cell of a .csv file says; the cell where it says none."""
    for kind in (int, float):
        try:
            return kind(cell)
        except ValueError:
            pass
    return cell


def _check_number(value: Any, field: str, where: str) -> None:
    if isinstance(value, float) and math.isfinite(value):
        return
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return
    raise DataError(
        f"{where}: column {field!r} holds {value!r:.80}, a {type(value).__name__}, but must hold a finite number."
    )

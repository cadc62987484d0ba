"""The pipeline's timeline: as each rank has measured it, and as the schedule has it.

The run's directory holds `timeline/planned.json` and `timeline/rank-00000.jsonl` and so on, which the strategy writes.
Only the ends of these are read.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from ..files.parsing import read_json_object
from ..train.run.run_directory import PLANNED
from .tail import Tail, number, parse_lines

_FILE = re.compile(r"rank-(\d{1,9})\.jsonl")
_WINDOW = 1 << 18
_MAX_FILES = 256
_MAX_ACTIONS = 100_000


def look(directory: Path, step: int | None = None) -> dict[str, Any]:
    """The timeline of one step, values of JSON.

    Args:
        directory: of the timelines.
        step: None: the latest.

    Returns:
        "planned", as its file has it, or None; "steps", those that were measured; "step", the one that is told of; and
        "measured", a list with "rank", "pp_rank" and "actions", each [kind, stage, microbatch, start, end] in seconds
        from the first start of all.
    """
    by_step: dict[int, list[dict[str, Any]]] = {}
    for rank, path in _files(directory):
        for record in parse_lines(Tail(path, window=_WINDOW).read(_WINDOW).lines)[0]:
            found = _measured(rank, record)
            if found is not None:
                known = by_step.setdefault(found[0], [])
                # A run that has gone back measures a step again.
                known[:] = [each for each in known if each["rank"] != rank]
                known.append(found[1])
    steps = sorted(by_step)
    at = step if step in by_step else (steps[-1] if steps else None)
    measured = sorted(by_step.get(at, []) if at is not None else [], key=lambda each: (each["pp_rank"], each["rank"]))
    begin = min((each["begin"] for each in measured), default=0.0)
    for each in measured:
        late = each.pop("begin") - begin
        each["actions"] = [
            [kind, stage, batch, start + late, end + late] for kind, stage, batch, start, end in each["actions"]
        ]
    return {"planned": _planned(directory / PLANNED), "steps": steps, "step": at, "measured": measured}


def _files(directory: Path) -> list[tuple[int, Path]]:
    try:
        names = [path.name for path in directory.iterdir()]
    except OSError:
        return []
    found = sorted((int(match[1]), name) for name in names if (match := _FILE.fullmatch(name)))
    return [(rank, directory / name) for rank, name in found[:_MAX_FILES]]


def _measured(rank: int, record: dict[str, Any]) -> tuple[int, dict[str, Any]] | None:
    """A step and what a rank did in it; None: the line holds none."""
    step, begin, actions = record.get("step"), number(record.get("time")), _actions(record.get("actions"))
    if type(step) is not int or begin is None or not math.isfinite(begin) or not actions:
        return None
    pp_rank = record.get("pp_rank")
    return step, {
        "rank": rank,
        "pp_rank": pp_rank if type(pp_rank) is int else rank,
        "begin": begin,
        "actions": actions,
    }


def _planned(path: Path) -> dict[str, Any] | None:
    try:
        found = read_json_object(path)
    except (OSError, ValueError):
        return None
    ranks = found.get("ranks")
    if not isinstance(ranks, list):
        return None
    return {
        "schedule": str(found.get("schedule", "")),
        "unit": str(found.get("unit", "")),
        "bubble": number(found.get("bubble", 0.0)),
        "ranks": [_actions(each) for each in ranks[:_MAX_FILES]],
    }


def _actions(value: Any) -> list[list[Any]]:
    """Those that are [text, int, int, number, number]."""
    found = []
    for each in value[:_MAX_ACTIONS] if isinstance(value, list) else []:
        kinds = [type(part) for part in each] if isinstance(each, list) else []
        if kinds[:3] == [str, int, int] and len(kinds) == 5 and {*kinds[3:]} <= {int, float}:
            start, end = number(each[3]), number(each[4])
            if start is not None and end is not None and math.isfinite(start) and math.isfinite(end):
                found.append([*each[:3], start, end])
    return found

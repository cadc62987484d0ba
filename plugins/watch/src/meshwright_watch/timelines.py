"""The pipeline's timeline: as each rank has measured it, and as the schedule has it.

The strategy writes `timeline/planned.json` and `timeline/rank-00000.jsonl` and so on; only the ends of these are read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwright.plugin import read_json_object
from meshwright_run.run_directory import PLANNED

from .tail import Tail, is_finite, number, numbered_files, parse_lines

_WINDOW = 1 << 18
_MAX_FILES = 256
_MAX_ACTIONS = 100_000


def look(directory: Path, step: int | None = None) -> dict[str, Any]:
    """Return the timeline of one step, or of the latest, as values of JSON.

    Returns:
        "planned", as its file has it, or None; "steps", those that were measured; "step", the one that is shown; and
        "measured", a list with "rank", "pp_rank" and "actions", each [kind, stage, microbatch, start, end] in seconds
        from the first start of all.
    """
    by_step: dict[int, dict[int, dict[str, Any]]] = {}
    for rank, path in numbered_files(directory, r"rank-(\d{1,9})\.jsonl", _MAX_FILES).items():
        for record in parse_lines(Tail(path, window=_WINDOW).read(_WINDOW).lines)[0]:
            at, actions, pp_rank = record.get("step"), _actions(record.get("actions")), record.get("pp_rank")
            if type(at) is int and is_finite(record.get("time")) and actions:
                # A run that has gone back measures a step again.
                pp_rank = pp_rank if type(pp_rank) is int else rank
                measured = {"rank": rank, "pp_rank": pp_rank, "begin": record["time"], "actions": actions}
                by_step.setdefault(at, {})[rank] = measured
    steps = sorted(by_step)
    shown = step if step in by_step else (steps[-1] if steps else None)
    found = by_step.get(shown, {}).values() if shown is not None else ()
    ranks = sorted(found, key=lambda each: (each["pp_rank"], each["rank"]))
    begin = min((each["begin"] for each in ranks), default=0.0)
    for each in ranks:
        late = each.pop("begin") - begin
        each["actions"] = [
            [kind, stage, batch, start + late, end + late] for kind, stage, batch, start, end in each["actions"]
        ]
    return {"planned": _planned(directory / PLANNED), "steps": steps, "step": shown, "measured": ranks}


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
    """Those that are [text, int, int, finite number, finite number]."""
    found = []
    for each in value[:_MAX_ACTIONS] if isinstance(value, list) else []:
        kinds = [type(part) for part in each] if isinstance(each, list) else []
        if kinds[:3] == [str, int, int] and len(kinds) == 5 and all(map(is_finite, each[3:])):
            found.append([*each[:3], *map(number, each[3:])])
    return found

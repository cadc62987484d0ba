"""Pictures of a plan as one page of HTML that needs no network: its style, script and data are in it.

What moves (memory over the step, the timeline) is drawn by `web/page.js` on canvases, all else is SVG; each picture has
its numbers as a table beside it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from ...base.errors import ConfigError
from ...mesh.sizes import EXPERT_AXES, ROOT_AXES
from ..meter import ROUND_TO
from . import sections
from .colours import variables
from .series import PHASES, Lane, Memory
from .shown import Shown

WEB = Path(__file__).parent / "web"
NANO = 1e9


def write_page(path: Path, subject: Shown) -> None:
    """Write all pictures and tables of a plan into one file of HTML.

    Raises:
        ConfigError: it cannot be written.
    """
    text = page(subject)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}.") from error


def page(subject: Shown) -> str:
    """The page's text."""
    has_layouts = bool(subject.layouts)
    data = json.dumps(values(subject), separators=(",", ":")).replace("<", "\\u003c")
    parts = {
        "title": escape(subject.title),
        "style": variables() + "\n" + _file("page.css"),
        "script": _file("page.js"),
        "data": data,
        "facts": sections.facts(subject),
        "memory": sections.memory(subject),
        "timeline": sections.timeline(subject),
        "mesh": sections.mesh(subject),
        "traffic": sections.traffic(subject),
        "layouts": sections.layouts(subject) if has_layouts else "",
        "layouts_link": ' <a href="#layouts-section">Layouts</a>' if has_layouts else "",
        "source": f"Device: {escape(subject.device.name)}.",
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _file("page.html"))


def _file(name: str) -> str:
    return (WEB / name).read_text(encoding="utf-8")


# -- data of the script


def values(subject: Shown) -> dict[str, Any]:
    """What the script draws.

    Times are in nanoseconds and memory in units of `ROUND_TO`; series are told by their changes.
    """
    names: dict[str, int] = {}
    degrees = subject.degrees
    axes = [[axis, getattr(degrees, axis)] for axis in ROOT_AXES]
    expert_axes = [[axis, getattr(degrees, axis)] for axis in EXPERT_AXES] if degrees.ep > 1 else []
    found = {
        "end": round(max(line.seconds for line in subject.lines) * NANO),
        "unit": ROUND_TO,
        "limit": subject.limit,
        "phases": list(PHASES),
        "memory": [
            _of_memory(each, reserved, names) for each, reserved in zip(subject.memories, subject.reserved, strict=True)
        ],
        "lanes": [_of_lane(each, names) for each in subject.lanes],
        "mesh": {"node": subject.device.node.ranks, "world": degrees.world_size, "axes": [axes, expert_axes]},
    }
    return found | {"names": list(names)}


def _of_memory(found: Memory, reserved: int, names: dict[str, int]) -> dict[str, Any]:
    return {
        "rank": found.rank,
        "reserved": reserved,
        "peak": found.peak,
        "time": _changes(round(each * NANO) for each in found.seconds),
        "owners": {owner: _changes(each // ROUND_TO for each in sizes) for owner, sizes in found.owners.items()},
        "names": [names.setdefault(name, len(names)) for name in found.operators],
        "phases": [PHASES.index(phase) for phase in found.phases],
    }


def _of_lane(lane: Lane, names: dict[str, int]) -> dict[str, Any]:
    """Of each bar: how long after the one before it begins, how long it is and works, name, phase, operators."""
    bars, before = [], 0
    for bar in lane.bars:
        start = round(bar.start * NANO)
        length, busy = round((bar.end - bar.start) * NANO), round(bar.busy * NANO)
        name = names.setdefault(bar.name, len(names))
        bars += [start - before, length, busy, name, PHASES.index(bar.phase), bar.count]
        before = start
    return {"rank": lane.rank, "stream": lane.stream, "link": lane.link, "bars": bars}


def _changes(series: Iterable[int]) -> list[int]:
    return [after - before for before, after in pairwise([0, *series])]

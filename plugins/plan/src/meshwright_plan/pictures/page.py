"""Pictures of a plan as one HTML page that needs no network: its style, script and data are in it.

Memory over the step and the timeline are drawn by `web/page.js` on canvases, all else is SVG; each picture has its
numbers as a table.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from meshwright.plugin import EXPERT_AXES, ROOT_AXES, ConfigError

from ..meter import OWNERS, ROUND_TO
from ..report import size_text, time_text
from . import drawings
from .drawings import DASH, groups
from .marks import Text, variables
from .shown import LINK_NAMES, LINKS, PHASES, Lane, Memory, Shown, busiest, frontier, traffic

WEB = Path(__file__).parent / "web"
NANO = 1e9
MOST_ROWS = 60


def write_page(path: Path, subject: Shown) -> None:
    """Write all pictures and tables of a plan into one HTML file."""
    text = page(subject)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}.") from error


def page(subject: Shown) -> str:
    parts = {
        "title": escape(subject.title),
        "style": variables() + "\n" + _file("page.css"),
        "script": _file("page.js"),
        "data": json.dumps(values(subject), separators=(",", ":")).replace("<", "\\u003c"),
        "device": escape(subject.device.name),
        **_facts(subject),
        **_memory(subject),
        **_timeline(subject),
        "mesh": _mesh(subject),
        "rank": str(subject.traces[0].rank),
        "last_rank": str(subject.degrees.world_size - 1),
        "traffic": _traffic(subject),
        "layouts": _layouts(subject) if subject.layouts else "",
        "layouts_link": ' <a href="#layouts-section">Layouts</a>' if subject.layouts else "",
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _file("page.html"))


def _file(name: str) -> str:
    return (WEB / name).read_text(encoding="utf-8")


# -- data of the script


def values(subject: Shown) -> dict[str, Any]:
    """Return what the script draws: nanoseconds, memory in units of `ROUND_TO`, and series as their changes."""
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
    """Return six numbers for each bar: start after the one before, length, work, name, phase, operators."""
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


# -- parts of the page


def _facts(subject: Shown) -> dict[str, str]:
    plan, fits = subject.plan, subject.plan["fits"]
    usable = f"of {size_text(subject.limit)} usable"
    facts = [
        ("good" if fits else "bad", "on " + subject.device.name, "fits" if fits else "does not fit", ""),
        ("", "reserved at the peak", size_text(plan["peak_reserved_bytes"]), usable),
        ("", "held between steps", size_text(plan["held_bytes"]), "the largest of the ranks"),
        ("", "a step", time_text(plan["step_seconds"]), ""),
        ("", "tokens", f"{plan['tokens_per_second_per_device']:,.0f}", "a second and device"),
        ("", "ranks", f"{subject.degrees.world_size:,}", f"nodes of {subject.device.node.ranks}"),
    ]
    rows = (
        f'<div class="{kind}"><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(more)}</small></dd></div>'
        for kind, name, value, more in facts
    )
    note = (
        f'<p class="note">Memory over the step and the timeline are of {escape(subject.depth)}, which are alike. '
        f"The numbers above, bytes over links and layouts are of all {subject.layers}.</p>"
    )
    depth = f", {escape(subject.depth)}" if subject.depth else ""
    return {"facts": "".join(rows), "depth_note": note if subject.depth else "", "depth": depth}


def _memory(subject: Shown) -> dict[str, str]:
    found = subject.memories
    used = [owner for owner in OWNERS if any(owner in each.owners for each in found)]
    legend = (
        f'<li><i style="background:var(--owner-{owner})"></i><b>{owner}</b> <span data-owner="{owner}"></span></li>'
        for owner in reversed(used)
    )
    options = "".join(f'<option value="{place}">rank {each.rank}</option>' for place, each in enumerate(found))
    rows = []
    for each, reserved in zip(found, subject.reserved, strict=True):
        row = [f"{each.rank}", *(size_text(each.owners[o][each.peak]) if o in each.owners else DASH for o in used)]
        row += [size_text(each.totals[each.peak]), size_text(reserved), time_text(each.seconds[each.peak])]
        rows.append([*row, each.operators[each.peak]])
    head = ["rank", *used, "peak", "reserved", "at", "operator"]
    return {
        "memory_rank": f"rank {found[0].rank}" if len(found) == 1 else "a rank",
        "memory_choice": f'<label>of <select id="memory-rank">{options}</select></label>' if len(found) > 1 else "",
        "memory_legend": "".join(legend),
        "memory_table": _table("Held at the peak of each rank, by owner", head, rows),
    }


def _timeline(subject: Shown) -> dict[str, str]:
    signs = {phase: f"phase-{phase}" for phase in PHASES}
    signs |= {f"communication {LINK_NAMES[link]}": f"link-{link}" for link in LINKS}
    rows = []
    seconds = {line.rank: line.seconds for line in subject.lines}
    for lane in subject.lanes:
        busy, count = sum(bar.busy for bar in lane.bars), sum(bar.count for bar in lane.bars)
        link, share = LINK_NAMES.get(lane.link, ""), busy / seconds[lane.rank]
        rows.append([f"{lane.rank}", lane.stream, link, f"{count:,}", time_text(busy), f"{share:.1%}"])
    head = ["rank", "stream", "link", "operators", "works", "of its step"]
    return {
        "timeline_said": "Streams of one rank of each stage; what a stage waits for is empty: the bubble."
        if len(subject.lines) > 1
        else "Streams of a rank: what it computes, and each group's collectives, beside each other.",
        "timeline_height": str(34 + 19 * len(subject.lanes) + 26 * len(subject.lines)),
        "timeline_legend": "".join(
            f'<li><i style="background:var(--{colour})"></i><b>{name}</b></li>' for name, colour in signs.items()
        ),
        "timeline_table": _table("How long each stream works", head, rows, words=(1, 2)),
    }


def _mesh(subject: Shown) -> str:
    degrees, device, rank = subject.degrees, subject.device, subject.traces[0].rank
    picture = drawings.mesh(subject)
    drawn = _wide(picture.svg())
    if degrees.ep > 1:
        experts = drawings.mesh(subject, EXPERT_AXES, "expert-map", "The same ranks, as experts are on them")
        drawn += f"<p>The same ranks, as experts lie on them:</p>{_wide(experts.svg())}"
    if not any(isinstance(mark, Text) and mark.words.startswith("node ") for mark in picture.marks):
        drawn += f'<p class="note">Groups lie across the borders of nodes of {device.node.ranks} ranks.</p>'
    rows = []
    for each in groups(degrees, device, rank):
        few = each.ranks if len(each.ranks) <= 8 else (*each.ranks[:3], f"… {each.ranks[-1]}")
        row = [each.name, f"{len(each.ranks):,}", f"{each.groups:,}", ", ".join(map(str, few)), f"{each.nodes:,}"]
        rows.append([*row, LINK_NAMES[each.link], each.shares])
    head = ["group", "ranks", "groups", f"that of rank {rank}", "on nodes", "link", "its ranks have"]
    return drawn + _table("Groups", head, rows, words=(3, 5, 6), is_open=True)


def _traffic(subject: Shown) -> str:
    rows, node = traffic(subject), subject.device.node
    if not rows:
        return '<p class="quiet">Nothing is sent.</p>'
    said = (
        f"What one device sends in a step, by group: to others of its node ({node.inside.bandwidth / 1e9:,.0f} GB/s), "
        f"and to other nodes ({node.between.bandwidth / 1e9:,.0f} GB/s). Seconds are those in which it is under way, "
        f"and how much of that is hidden behind computing. Of collectives on rings."
    )
    cells = []
    for each in rows:
        row = [f"{each.rank}", each.stream, f"{each.ranks:,}", f"{each.calls:,}", size_text(each.inside)]
        cells.append([*row, size_text(each.between), time_text(each.seconds), f"{each.hidden:.0%}"])
    head = ["rank", "group", "ranks", "calls", *LINK_NAMES.values(), "seconds", "hidden"]
    table = _table("Of all ranks that are drawn", head, cells, words=(1,))
    return f'<p class="quiet">{said}</p>{_wide(drawings.links(busiest(rows)).svg())}{table}'


def _layouts(subject: Shown) -> str:
    found, best = subject.layouts, frontier(subject.layouts)
    order = sorted(found, key=lambda each: (not each["fits"], each["step_seconds"]))
    rows = []
    for each in order[:MOST_ROWS]:
        fits, is_best = "fits" if each["fits"] else "does not fit", "yes" if each in best else ""
        row = [each["label"], time_text(each["step_seconds"]), size_text(each["peak_reserved_bytes"])]
        rows.append([*row, fits, is_best])
    fitting = sum(1 for each in found if each["fits"])
    said = f"{len(found):,} layouts, of which {fitting:,} fit. The line joins those that no other beats in both."
    shown = drawings.drawn_layouts(found)
    if len(shown) < len(found):
        said += f" Drawn are these and the fastest: {len(shown):,}."
    caption = "All layouts" if len(order) <= MOST_ROWS else f"The first {MOST_ROWS} of {len(order):,}"
    table = _table(
        f"{caption}, those that fit first, then by time", ["layout", "a step", "reserved", "fits", "on the line"], rows
    )
    return (
        '<section id="layouts-section" aria-labelledby="layouts-head"><h2 id="layouts-head">Layouts: memory against '
        f'time</h2><p class="quiet">{said}</p>{_wide(drawings.layouts(subject).svg())}{table}</section>'
    )


def _wide(content: str) -> str:
    return f'<div class="wide">{content}</div>'


def _table(
    caption: str,
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    words: Sequence[int] = (),
    is_open: bool = False,
) -> str:
    """Return a table that the reader can open; the columns `words` hold text."""
    kinds = ["text" if place in words else "" for place in range(len(head))]
    top = "".join(f'<th scope="col" class="{kind}">{escape(name)}</th>' for name, kind in zip(head, kinds, strict=True))
    body = []
    for row in rows:
        cells = [f'<td class="{kind}">{escape(cell)}</td>' for cell, kind in zip(row, kinds, strict=True)]
        body.append("<tr>" + f'<th scope="row">{escape(row[0])}</th>' + "".join(cells[1:]) + "</tr>")
    inner = _wide(
        f"<table><caption>{escape(caption)}</caption><thead><tr>{top}</tr></thead><tbody>{''.join(body)}</tbody></table>"
    )
    return inner if is_open else f"<details><summary>As a table</summary>{inner}</details>"

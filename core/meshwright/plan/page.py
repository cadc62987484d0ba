"""Pictures of a plan as one page of HTML that needs no network: its style, script and data are in it.

What moves (memory over the step, the timeline) is drawn by `web/page.js` on canvases, all else is SVG; each picture has
its numbers as a table beside it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from ..mesh.sizes import EXPERT_AXES, ROOT_AXES
from . import drawings
from .allocator import ROUND_TO
from .colours import LINK, OWNER, PHASE, variables
from .drawings import size_text, time_text
from .mesh_map import boxes, groups
from .meter import OWNERS
from .pictures import LINK_NAMES, Shown, Traffic, frontier, traffic
from .series import LINKS, PHASES, Lane, Memory, lanes
from .time import COMPUTE

WEB = Path(__file__).parent / "web"
NANO = 1e9
MOST_ROWS = 60


def write_page(path: Path, subject: Shown) -> None:
    """Write all pictures and tables of a plan into one file of HTML.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(subject), encoding="utf-8")


def page(subject: Shown) -> str:
    """The page's text."""
    has_layouts = bool(subject.layouts)
    data = json.dumps(values(subject), separators=(",", ":")).replace("<", "\\u003c")
    parts = {
        "title": escape(subject.title),
        "style": variables() + "\n" + _file("page.css"),
        "script": _file("page.js"),
        "data": data,
        "facts": _facts(subject),
        "memory": _memory(subject),
        "timeline": _timeline(subject),
        "mesh": _mesh(subject),
        "traffic": _traffic(subject),
        "layouts": _layouts(subject) if has_layouts else "",
        "layouts_link": ' <a href="#layouts-section">Layouts</a>' if has_layouts else "",
        "source": f"Device: {escape(subject.device.name)}.",
    }
    text = _file("page.html")
    for name, value in parts.items():
        text = text.replace("{{" + name + "}}", value, 1)
    return text


def _file(name: str) -> str:
    return (WEB / name).read_text(encoding="utf-8")


# -- data of the script


def values(subject: Shown) -> dict[str, Any]:
    """What the script draws. Times are in nanoseconds and memory in units of `ROUND_TO`; series are told by their changes."""
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
            _of_memory(each, reserved, names)
            for each, reserved in zip(subject.memories, subject.reserved, strict=True)
        ],
        "lanes": [_of_lane(each, names) for each in _lanes(subject)],
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


def _lanes(subject: Shown) -> list[Lane]:
    return lanes(subject.traces, subject.lines, subject.degrees, subject.device)


# -- parts of the page


def _facts(subject: Shown) -> str:
    plan = subject.plan
    fits = plan["fits"]
    facts = [
        ("good" if fits else "bad", "on " + subject.device.name, "fits" if fits else "does not fit", ""),
        (
            "",
            "reserved at the peak",
            size_text(plan["peak_reserved_bytes"]),
            f"of {size_text(subject.limit)} that can be",
        ),
        ("", "held between steps", size_text(plan["held_bytes"]), "the largest of the ranks"),
        ("", "a step", time_text(plan["step_seconds"]), ""),
        ("", "tokens", f"{plan['tokens_per_second_per_device']:,.0f}", "a second and device"),
        ("", "ranks", f"{subject.degrees.world_size:,}", f"nodes of {subject.device.node.ranks}"),
    ]
    rows = (
        f'<div class="{kind}"><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(more)}</small></dd></div>'
        for kind, name, value, more in facts
    )
    return f'<dl class="facts">{"".join(rows)}</dl>{_depth_note(subject)}'


def _depth_note(subject: Shown) -> str:
    if subject.is_whole:
        return ""
    return (
        f'<p class="note">Memory over the step and the timeline are of {escape(subject.depth)}, which are alike. '
        f"The numbers above, bytes over links and layouts are of all {subject.layers}.</p>"
    )


def _section(name: str, title: str, said: str, *parts: str) -> str:
    return (
        f'<section id="{name}" aria-labelledby="{name}-head"><h2 id="{name}-head">{escape(title)}</h2>'
        f'<p class="quiet">{escape(said)}</p>{"".join(parts)}</section>'
    )


def _of(subject: Shown) -> str:
    return f", {subject.depth}" if subject.depth else ""


def _memory(subject: Shown) -> str:
    first, found = subject.memories[0], subject.memories
    used = [owner for owner in OWNERS if any(owner in each.owners for each in found)]
    legend = [
        f'<li><i style="background:var(--owner-{owner})"></i><b>{owner}</b> <span data-owner="{owner}"></span></li>'
        for owner in reversed(used)
        if owner in OWNER
    ]
    legend.append('<li><i class="stroke" style="border-color:var(--text)"></i><b>reserved</b><span data-reserved></span></li>')
    legend.append('<li><i class="stroke" style="border-color:var(--limit)"></i><b>can be reserved</b><span data-limit></span></li>')
    options = "".join(f'<option value="{place}">rank {each.rank}</option>' for place, each in enumerate(found))
    choice = f'<label>of <select id="memory-rank">{options}</select></label>' if len(found) > 1 else ""
    tools = _tools("memory", choice, '<button type="button" data-do="peak">To the peak</button>')
    said = (
        f"What rank {first.rank} holds while each operator runs, by whose it is. The time is that of its computing "
        f"stream. Legend: bytes at the peak."
    )
    if len(found) > 1:
        said = said.replace(f"rank {first.rank}", "a rank")
    rows = [
        [f"{each.rank}", *(size_text(each.owners[o][each.peak]) if o in each.owners else "–" for o in used)]
        + [size_text(each.totals[each.peak]), size_text(reserved), time_text(each.seconds[each.peak])]
        + [each.operators[each.peak]]
        for each, reserved in zip(found, subject.reserved, strict=True)
    ]
    head = ["rank", *used, "peak", "reserved", "at", "operator"]
    return _section(
        "memory",
        f"Memory over the step{_of(subject)}",
        said,
        tools,
        _canvas("memory", "Memory over the step, stacked by owner", 340),
        f'<ul class="legend" aria-label="Owners">{"".join(legend)}</ul>',
        table("Held at the peak of each rank, by owner", head, rows),
    )


def _tools(name: str, *others: str) -> str:
    buttons = (("in", "+", "Zoom in"), ("out", "−", "Zoom out"), ("left", "←", "Earlier"), ("right", "→", "Later"))
    drawn = "".join(
        f'<button type="button" data-do="{do}" aria-label="{said}" title="{said}">{sign}</button>'
        for do, sign, said in buttons
    )
    keys = "Drag to zoom into a stretch. Keys: arrows, + and −, 0 for all"
    return (
        f'<div class="tools" data-of="{name}">{"".join(others[:1])}{drawn}'
        f'<button type="button" data-do="all">Whole step</button>{"".join(others[1:])}'
        f'<span class="keys">{keys}</span></div>'
    )


def _canvas(name: str, said: str, height: int) -> str:
    return (
        f'<figure><div class="chart"><canvas id="{name}-chart" tabindex="0" role="application" height="{height}" '
        f'style="height:{height}px" aria-label="{escape(said)}. Arrow keys read it, plus and minus zoom." '
        f'aria-describedby="{name}-read"></canvas></div>'
        f'<figcaption class="read" id="{name}-read" aria-live="polite"></figcaption></figure>'
    )


def _timeline(subject: Shown) -> str:
    found = _lanes(subject)
    phases = "".join(
        f'<li><i style="background:var(--phase-{phase})"></i><b>{phase}</b></li>' for phase in PHASES if phase in PHASE
    )
    joined = "".join(
        f'<li><i style="background:var(--link-{link})"></i><b>communication {LINK_NAMES[link]}</b></li>'
        for link in LINKS
        if link in LINK
    )
    stages = len(subject.lines) > 1
    said = (
        "Streams of one rank of each stage; what a stage waits for is empty: the bubble."
        if stages
        else "Streams of a rank: what it computes, and each group's collectives, beside each other."
    )
    rows = []
    for line, own in zip(subject.lines, (list(each) for _, each in groupby(found, key=lambda lane: lane.rank)), strict=True):
        for lane in own:
            busy = sum(bar.busy for bar in lane.bars)
            count = sum(bar.count for bar in lane.bars)
            link = LINK_NAMES.get(lane.link, "")
            cells = [f"{lane.rank}", lane.stream, link, f"{count:,}", time_text(busy), f"{busy / line.seconds:.1%}"]
            rows.append(cells)
    height = 34 + sum(19 for _ in found) + 26 * len(subject.lines)
    head = ["rank", "stream", "link", "operators", "works", "of its step"]
    return _section(
        "timeline",
        f"Timeline of a step{_of(subject)}",
        said,
        _tools("timeline"),
        _canvas("timeline", "Timeline of streams", height),
        f'<ul class="legend" aria-label="Colours">{phases}{joined}</ul>',
        table("How long each stream works", head, rows, words=(1, 2)),
    )


def _mesh(subject: Shown) -> str:
    degrees, device = subject.degrees, subject.device
    found = boxes(degrees, device)
    title = f"{degrees} on nodes of {device.node.ranks} ranks, as blocks within blocks"
    drawn = f'<div class="wide">{drawings.mesh(found, "mesh-map", title)}</div>'
    if degrees.ep > 1:
        experts = drawings.mesh(boxes(degrees, device, EXPERT_AXES), "expert-map", "The same ranks, as experts are on them")
        drawn += f'<p>The same ranks, as experts lie on them:</p><div class="wide">{experts}</div>'
    rank = subject.traces[0].rank
    rows = [
        [each.name, f"{len(each.ranks):,}", f"{each.groups:,}", ranks_text(each.ranks), f"{each.nodes:,}"]
        + [LINK_NAMES[each.link], each.shares]
        for each in groups(degrees, device, rank)
    ]
    head = ["group", "ranks", "groups", f"that of rank {rank}", "on nodes", "link", "its ranks have"]
    last = degrees.world_size - 1
    finder = (
        f'<div class="tools"><label>Rank <input id="rank" type="number" min="0" max="{last}" value="{rank}"></label>'
        f'</div><p class="read" id="rank-read" aria-live="polite"></p>'
    )
    said = "Which ranks share what. A frame is a group of ranks along an axis; its colour is the link that joins them."
    note = ""
    if not any(box.kind == "node" for box in found):
        note = f'<p class="note">Groups lie across the borders of nodes of {device.node.ranks} ranks.</p>'
    shown = table("Groups", head, rows, words=(3, 5, 6), is_open=True)
    return _section("mesh", "Mesh: who shares what", said, drawn, note, shown, finder)


def ranks_text(ranks: Sequence[int]) -> str:
    """All of few, the first and the last of many."""
    if len(ranks) <= 8:
        return ", ".join(f"{rank:,}" for rank in ranks)
    return ", ".join(f"{rank:,}" for rank in ranks[:3]) + f", … {ranks[-1]:,}"


def _traffic(subject: Shown) -> str:
    rows = traffic(subject)
    node = subject.device.node
    said = (
        f"What one device sends in a step, by group: to others of its node ({node.inside.bandwidth / 1e9:,.0f} GB/s), "
        f"and to other nodes ({node.between.bandwidth / 1e9:,.0f} GB/s). Seconds are those in which it is under way, "
        f"and how much of that is hidden behind computing. Of collectives on rings."
    )
    if not rows:
        return _section("traffic", "Bytes over each link", "Nothing is sent.")
    drawn = busiest(rows)
    title = f"Bytes over each link, of rank {drawn[0].rank}"
    cells = [
        [f"{each.rank}", each.stream, f"{each.ranks:,}", f"{each.calls:,}", size_text(each.inside)]
        + [size_text(each.between), time_text(each.seconds), f"{each.hidden:.0%}"]
        for each in rows
    ]
    head = ["rank", "group", "ranks", "calls", LINK_NAMES["inside"], LINK_NAMES["between"], "seconds", "hidden"]
    picture = f'<div class="wide">{drawings.links(drawn, title)}</div>'
    return _section("traffic", title, said, picture, table("Of all ranks that are drawn", head, cells, words=(1,)))


def busiest(rows: Sequence[Traffic]) -> list[Traffic]:
    """Those of the rank that sends the most, without what is less than a thousandth of its most."""
    of_rank = {rank: list(each) for rank, each in groupby(rows, key=lambda row: row.rank)}
    own = max(of_rank.values(), key=lambda each: sum(row.inside + row.between for row in each))
    most = max(max(row.inside, row.between) for row in own)
    return [row for row in own if max(row.inside, row.between) * 1000 >= most] or own


def _layouts(subject: Shown) -> str:
    found = subject.layouts
    best = frontier(found)
    order = sorted(found, key=lambda each: (not each["fits"], each["step_seconds"]))
    rows = [
        [each["label"], time_text(each["step_seconds"]), size_text(each["peak_reserved_bytes"])]
        + ["fits" if each["fits"] else "does not fit", "yes" if each in best else ""]
        for each in order[:MOST_ROWS]
    ]
    fitting = sum(1 for each in found if each["fits"])
    said = f"{len(found):,} layouts, of which {fitting:,} fit. The line joins those that no other beats in both."
    shown = drawings.drawn_layouts(found)
    if len(shown) < len(found):
        said += f" Drawn are these and the fastest: {len(shown):,}."
    legend = (
        '<ul class="legend" aria-label="Signs"><li><i style="background:var(--fit-fits);border-radius:50%"></i>'
        "<b>on the line</b></li><li><i style=\"border:2px solid var(--fit-fits);border-radius:50%\"></i><b>fits</b></li>"
        '<li><b style="color:var(--fit-too-large)">×</b> <b>does not fit</b></li></ul>'
    )
    picture = drawings.layouts(found, subject.limit, "Layouts by time and memory")
    head = ["layout", "a step", "reserved", "fits", "on the line"]
    caption = "All layouts" if len(order) <= MOST_ROWS else f"The first {MOST_ROWS} of {len(order):,}"
    return _section(
        "layouts-section",
        "Layouts: memory against time",
        said,
        f'<div class="wide">{picture}</div>',
        legend,
        table(f"{caption}, those that fit first, then by time", head, rows),
    )


def table(
    caption: str, head: Sequence[str], rows: Sequence[Sequence[str]], *, words: Sequence[int] = (), is_open: bool = False
) -> str:
    """A table that can be opened; the columns `words` are texts."""
    kinds = ["text" if place in words else "" for place in range(len(head))]
    top = "".join(f'<th scope="col" class="{kind}">{escape(name)}</th>' for name, kind in zip(head, kinds, strict=True))
    body = []
    for row in rows:
        cells = [f'<td class="{kind}">{escape(cell)}</td>' for cell, kind in zip(row, kinds, strict=True)]
        body.append("<tr>" + f'<th scope="row">{escape(row[0])}</th>' + "".join(cells[1:]) + "</tr>")
    inner = (
        f'<div class="wide"><table><caption>{escape(caption)}</caption><thead><tr>{top}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )
    return inner if is_open else f"<details><summary>As a table</summary>{inner}</details>"

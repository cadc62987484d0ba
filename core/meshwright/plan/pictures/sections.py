"""The parts of the page of a plan: each picture with what it shows in words, its legend, and its numbers as a table."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import groupby

from ...mesh.sizes import EXPERT_AXES
from ..meter import OWNERS
from . import drawings
from .mesh_map import boxes, groups
from .series import LINKS, PHASES
from .shown import LINK_NAMES, Shown, Traffic, frontier
from .shown import traffic as traffic_of
from .units import DASH, MINUS, TIMES, size_text, time_text

MOST_ROWS = 60
HINT = "Point at the picture, or choose it by Tab and go through it by the arrow keys."


def facts(subject: Shown) -> str:
    plan = subject.plan
    fits = plan["fits"]
    facts = [
        ("good" if fits else "bad", "on " + subject.device.name, "fits" if fits else "does not fit", ""),
        (
            "",
            "reserved at the peak",
            size_text(plan["peak_reserved_bytes"]),
            f"of {size_text(subject.limit)} usable",
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


def memory(subject: Shown) -> str:
    first, found = subject.memories[0], subject.memories
    used = [owner for owner in OWNERS if any(owner in each.owners for each in found)]
    legend = [
        f'<li><i style="background:var(--owner-{owner})"></i><b>{owner}</b> <span data-owner="{owner}"></span></li>'
        for owner in reversed(used)
    ]
    for name, colour, kind in (("reserved", "text", "data-reserved"), ("usable", "limit", "data-limit")):
        sign = f'<i class="stroke" style="border-color:var(--{colour})"></i>'
        legend.append(f"<li>{sign}<b>{name}</b><span {kind}></span></li>")
    options = "".join(f'<option value="{place}">rank {each.rank}</option>' for place, each in enumerate(found))
    choice = f'<label>of <select id="memory-rank">{options}</select></label>' if len(found) > 1 else ""
    tools = _tools("memory", choice, '<button type="button" data-do="peak">To the peak</button>')
    said = (
        f"What rank {first.rank} holds while each operator runs, by whose it is. The time is that of its computing "
        f"stream. Legend: bytes at the peak."
    )
    if len(found) > 1:
        said = said.replace(f"rank {first.rank}", "a rank")
    rows = []
    for each, reserved in zip(found, subject.reserved, strict=True):
        row = [f"{each.rank}", *(size_text(each.owners[o][each.peak]) if o in each.owners else DASH for o in used)]
        row += [size_text(each.totals[each.peak]), size_text(reserved), time_text(each.seconds[each.peak])]
        rows.append([*row, each.operators[each.peak]])
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
    buttons = (("in", "+", "Zoom in"), ("out", MINUS, "Zoom out"), ("left", "←", "Earlier"), ("right", "→", "Later"))
    drawn = "".join(
        f'<button type="button" data-do="{do}" aria-label="{said}" title="{said}">{sign}</button>'
        for do, sign, said in buttons
    )
    keys = f"Drag to zoom into a stretch. Keys: arrows, +, {MINUS}, 0"
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
        f'<figcaption class="read" id="{name}-read" aria-live="polite">{HINT}</figcaption></figure>'
    )


def timeline(subject: Shown) -> str:
    found = subject.lanes
    phases = "".join(f'<li><i style="background:var(--phase-{phase})"></i><b>{phase}</b></li>' for phase in PHASES)
    stages = len(subject.lines) > 1
    said = (
        "Streams of one rank of each stage; what a stage waits for is empty: the bubble."
        if stages
        else "Streams of a rank: what it computes, and each group's collectives, beside each other."
    )
    rows = []
    seconds = {line.rank: line.seconds for line in subject.lines}
    for lane in found:
        busy, count = sum(bar.busy for bar in lane.bars), sum(bar.count for bar in lane.bars)
        link, share = LINK_NAMES.get(lane.link, ""), busy / seconds[lane.rank]
        rows.append([f"{lane.rank}", lane.stream, link, f"{count:,}", time_text(busy), f"{share:.1%}"])
    height = 34 + sum(19 for _ in found) + 26 * len(subject.lines)
    head = ["rank", "stream", "link", "operators", "works", "of its step"]
    choice = '<label><input type="checkbox" id="timeline-all"> streams that work less than 0.1%</label>'
    return _section(
        "timeline",
        f"Timeline of a step{_of(subject)}",
        said,
        _tools("timeline", "", choice),
        _canvas("timeline", "Timeline of streams", height),
        f'<ul class="legend" aria-label="Colours">{phases}{_link_signs("communication ")}</ul>',
        table("How long each stream works", head, rows, words=(1, 2)),
    )


def _link_signs(what: str = "") -> str:
    return "".join(
        f'<li><i style="background:var(--link-{link})"></i><b>{what}{LINK_NAMES[link]}</b></li>' for link in LINKS
    )


def mesh(subject: Shown) -> str:
    degrees, device = subject.degrees, subject.device
    found = boxes(degrees, device)
    title = f"{degrees} on nodes of {device.node.ranks} ranks, as blocks within blocks"
    drawn = f'<div class="wide">{drawings.mesh(found, "mesh-map", title)}</div>'
    if degrees.ep > 1:
        experts = drawings.mesh(
            boxes(degrees, device, EXPERT_AXES), "expert-map", "The same ranks, as experts are on them"
        )
        drawn += f'<p>The same ranks, as experts lie on them:</p><div class="wide">{experts}</div>'
    rank = subject.traces[0].rank
    rows = []
    for each in groups(degrees, device, rank):
        row = [each.name, f"{len(each.ranks):,}", f"{each.groups:,}", ranks_text(each.ranks), f"{each.nodes:,}"]
        rows.append([*row, LINK_NAMES[each.link], each.shares])
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
    legend = f'<ul class="legend" aria-label="Colours">{_link_signs()}</ul>'
    return _section("mesh", "Mesh: who shares what", said, drawn, legend, note, shown, finder)


def ranks_text(ranks: Sequence[int]) -> str:
    """All of few, the first and the last of many."""
    if len(ranks) <= 8:
        return ", ".join(f"{rank}" for rank in ranks)
    return ", ".join(f"{rank}" for rank in ranks[:3]) + f", … {ranks[-1]}"


def traffic(subject: Shown) -> str:
    rows = traffic_of(subject)
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
    cells = []
    for each in rows:
        row = [f"{each.rank}", each.stream, f"{each.ranks:,}", f"{each.calls:,}", size_text(each.inside)]
        cells.append([*row, size_text(each.between), time_text(each.seconds), f"{each.hidden:.0%}"])
    head = ["rank", "group", "ranks", "calls", LINK_NAMES["inside"], LINK_NAMES["between"], "seconds", "hidden"]
    picture = f'<div class="wide">{drawings.links(drawn, title)}</div>'
    return _section("traffic", title, said, picture, table("Of all ranks that are drawn", head, cells, words=(1,)))


def busiest(rows: Sequence[Traffic]) -> list[Traffic]:
    """Those of the rank that sends the most, without what is less than a thousandth of its most."""
    of_rank = {rank: list(each) for rank, each in groupby(rows, key=lambda row: row.rank)}
    own = max(of_rank.values(), key=lambda each: sum(row.inside + row.between for row in each))
    most = max(max(row.inside, row.between) for row in own)
    return [row for row in own if max(row.inside, row.between) * 1000 >= most] or own


def layouts(subject: Shown) -> str:
    found = subject.layouts
    best = frontier(found)
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
    round_ = "border-radius:50%"
    legend = (
        f'<ul class="legend" aria-label="Signs"><li><i style="background:var(--fit-fits);{round_}"></i>'
        f'<b>on the line</b></li><li><i style="border:2px solid var(--fit-fits);{round_}"></i><b>fits</b></li>'
        f'<li><b style="color:var(--fit-too-large)">{TIMES}</b> <b>does not fit</b></li></ul>'
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
    caption: str,
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    words: Sequence[int] = (),
    is_open: bool = False,
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

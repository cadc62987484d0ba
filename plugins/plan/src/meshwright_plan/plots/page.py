"""Plots of a plan as one self-contained HTML page, which needs no network.

`web/page.js` draws memory and timeline on canvases; the other plots are SVG. Each plot has a table of its numbers.
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

from ..meter import MIN_BLOCK_SIZE, OWNERS
from ..tables import format_seconds, format_size
from . import figures
from .figures import DASH, list_rank_groups
from .marks import Text, format_css_variables
from .plot_data import (
    LINK_NAMES,
    LINKS,
    PHASES,
    Lane,
    MemoryCurve,
    PlotData,
    collect_traffic,
    find_pareto_frontier,
    select_busiest,
)

WEB_DIRECTORY = Path(__file__).parent / "web"
NS_PER_SECOND = 1e9
MAX_TABLE_ROWS = 60


def write_page(path: Path, plot_data: PlotData) -> None:
    """Write all plots and tables of a plan to one HTML file."""
    text = render_page(plot_data)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}.") from error


def render_page(plot_data: PlotData) -> str:
    parts = {
        "title": escape(plot_data.title),
        "style": format_css_variables() + "\n" + _read_asset("page.css"),
        "script": _read_asset("page.js"),
        "data": json.dumps(build_script_data(plot_data), separators=(",", ":")).replace("<", "\\u003c"),
        "device": escape(plot_data.device.name),
        **_render_facts(plot_data),
        **_render_memory(plot_data),
        **_render_timeline(plot_data),
        "mesh": _render_mesh(plot_data),
        "rank": str(plot_data.traces[0].rank),
        "last_rank": str(plot_data.degrees.world_size - 1),
        "traffic": _render_traffic(plot_data),
        "layouts": _render_layouts(plot_data) if plot_data.layouts else "",
        "layouts_link": ' <a href="#layouts-section">Layouts</a>' if plot_data.layouts else "",
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _read_asset("page.html"))


def _read_asset(name: str) -> str:
    return (WEB_DIRECTORY / name).read_text(encoding="utf-8")


# -- data of the script


def build_script_data(plot_data: PlotData) -> dict[str, Any]:
    """Return the script's data: times in ns, memory in units of `MIN_BLOCK_SIZE`, and delta-encoded series."""
    names: dict[str, int] = {}
    degrees = plot_data.degrees
    axes = [[axis, getattr(degrees, axis)] for axis in ROOT_AXES]
    expert_axes = [[axis, getattr(degrees, axis)] for axis in EXPERT_AXES] if degrees.ep > 1 else []
    found = {
        "end": round(max(line.seconds for line in plot_data.timelines) * NS_PER_SECOND),
        "unit": MIN_BLOCK_SIZE,
        "limit": plot_data.usable_bytes,
        "phases": list(PHASES),
        "memory": [
            _pack_memory(each, reserved, names)
            for each, reserved in zip(plot_data.memory_curves, plot_data.reserved_bytes, strict=True)
        ],
        "lanes": [_pack_lane(each, names) for each in plot_data.lanes],
        "mesh": {"node": plot_data.device.node.ranks, "world": degrees.world_size, "axes": [axes, expert_axes]},
    }
    return found | {"names": list(names)}


def _pack_memory(curve: MemoryCurve, reserved: int, names: dict[str, int]) -> dict[str, Any]:
    return {
        "rank": curve.rank,
        "reserved": reserved,
        "peak": curve.peak_index,
        "time": _delta_encode(round(each * NS_PER_SECOND) for each in curve.seconds),
        "owners": {
            owner: _delta_encode(each // MIN_BLOCK_SIZE for each in sizes)
            for owner, sizes in curve.bytes_by_owner.items()
        },
        "names": [names.setdefault(name, len(names)) for name in curve.operators],
        "phases": [PHASES.index(phase) for phase in curve.phases],
    }


def _pack_lane(lane: Lane, names: dict[str, int]) -> dict[str, Any]:
    """Return a lane with six numbers per bar: start minus previous start, length, busy time, name, phase, operators."""
    bars, before = [], 0
    for bar in lane.bars:
        start = round(bar.start * NS_PER_SECOND)
        length, busy = round((bar.end - bar.start) * NS_PER_SECOND), round(bar.busy * NS_PER_SECOND)
        name = names.setdefault(bar.name, len(names))
        bars += [start - before, length, busy, name, PHASES.index(bar.phase), bar.count]
        before = start
    return {"rank": lane.rank, "stream": lane.stream, "link": lane.link, "bars": bars}


def _delta_encode(series: Iterable[int]) -> list[int]:
    return [after - before for before, after in pairwise([0, *series])]


# -- parts of the page


def _render_facts(plot_data: PlotData) -> dict[str, str]:
    plan, fits = plot_data.plan, plot_data.plan["fits"]
    usable = f"of {format_size(plot_data.usable_bytes)} usable"
    facts = [
        ("good" if fits else "bad", "on " + plot_data.device.name, "fits" if fits else "does not fit", ""),
        ("", "reserved at the peak", format_size(plan["peak_reserved_bytes"]), usable),
        ("", "held between steps", format_size(plan["persistent_bytes"]), "maximum over ranks"),
        ("", "step time", format_seconds(plan["step_seconds"]), ""),
        ("", "tokens", f"{plan['tokens_per_second_per_device']:,.0f}", "per second and device"),
        ("", "ranks", f"{plot_data.degrees.world_size:,}", f"nodes of {plot_data.device.node.ranks}"),
    ]
    rows = (
        f'<div class="{kind}"><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(more)}</small></dd></div>'
        for kind, name, value, more in facts
    )
    note = (
        f'<p class="note">Memory over the step and the timeline show {escape(plot_data.depth_note)}, since blocks '
        f"are alike. The numbers above, bytes over links and layouts include all {plot_data.layers} blocks.</p>"
    )
    depth = f", {escape(plot_data.depth_note)}" if plot_data.depth_note else ""
    return {"facts": "".join(rows), "depth_note": note if plot_data.depth_note else "", "depth": depth}


def _render_memory(plot_data: PlotData) -> dict[str, str]:
    found = plot_data.memory_curves
    used = [owner for owner in OWNERS if any(owner in each.bytes_by_owner for each in found)]
    legend = (
        f'<li><i style="background:var(--owner-{owner})"></i><b>{owner}</b> <span data-owner="{owner}"></span></li>'
        for owner in reversed(used)
    )
    options = "".join(f'<option value="{index}">{each.rank}</option>' for index, each in enumerate(found))
    rows = []
    for each, reserved in zip(found, plot_data.reserved_bytes, strict=True):
        row = [
            f"{each.rank}",
            *(format_size(each.bytes_by_owner[o][each.peak_index]) if o in each.bytes_by_owner else DASH for o in used),
        ]
        row += [
            format_size(each.totals[each.peak_index]),
            format_size(reserved),
            format_seconds(each.seconds[each.peak_index]),
        ]
        rows.append([*row, each.operators[each.peak_index]])
    head = ["rank", *used, "peak", "reserved", "time of the peak", "operator"]
    return {
        "memory_rank": f"rank {found[0].rank}" if len(found) == 1 else "a rank",
        "memory_choice": f'<label>Rank <select id="memory-rank">{options}</select></label>' if len(found) > 1 else "",
        "memory_legend": "".join(legend),
        "memory_table": _render_table("Memory held at the peak of each rank, by owner", head, rows),
    }


def _render_timeline(plot_data: PlotData) -> dict[str, str]:
    signs = {phase: f"phase-{phase}" for phase in PHASES}
    signs |= {f"communication {LINK_NAMES[link]}": f"link-{link}" for link in LINKS}
    rows = []
    seconds = {line.rank: line.seconds for line in plot_data.timelines}
    for lane in plot_data.lanes:
        busy, count = sum(bar.busy for bar in lane.bars), sum(bar.count for bar in lane.bars)
        link, share = LINK_NAMES.get(lane.link, ""), busy / seconds[lane.rank]
        rows.append([f"{lane.rank}", lane.stream, link, f"{count:,}", format_seconds(busy), f"{share:.1%}"])
    head = ["rank", "stream", "link", "operators", "busy", "share of the step"]
    return {
        "timeline_description": "Streams of one rank per stage. In gaps a stage waits: the pipeline bubble."
        if len(plot_data.timelines) > 1
        else "Streams of a rank: the computing stream, and one for the collectives of each group.",
        "timeline_height": str(34 + 19 * len(plot_data.lanes) + 26 * len(plot_data.timelines)),
        "timeline_legend": "".join(
            f'<li><i style="background:var(--{colour})"></i><b>{name}</b></li>' for name, colour in signs.items()
        ),
        "timeline_table": _render_table("Busy time of each stream", head, rows, text_columns=(1, 2)),
    }


def _render_mesh(plot_data: PlotData) -> str:
    degrees, device, rank = plot_data.degrees, plot_data.device, plot_data.traces[0].rank
    picture = figures.draw_mesh(plot_data)
    drawn = _wrap_scrollable(picture.to_svg())
    if degrees.ep > 1:
        experts = figures.draw_mesh(plot_data, EXPERT_AXES, "expert-map", "The mesh, with the axes of experts")
        drawn += f"<p>The same ranks, with the axes of experts:</p>{_wrap_scrollable(experts.to_svg())}"
    if not any(isinstance(mark, Text) and mark.text.startswith("node ") for mark in picture.marks):
        drawn += f'<p class="note">Nodes of {device.node.ranks} ranks are not drawn: groups cross them.</p>'
    rows = []
    for each in list_rank_groups(degrees, device, rank):
        few = each.ranks if len(each.ranks) <= 8 else (*each.ranks[:3], f"… {each.ranks[-1]}")
        row = [
            each.name,
            f"{len(each.ranks):,}",
            f"{each.num_groups:,}",
            ", ".join(map(str, few)),
            f"{each.num_nodes:,}",
        ]
        rows.append([*row, LINK_NAMES[each.link], each.description])
    head = ["group", "ranks", "groups", f"group of rank {rank}", "nodes", "link", "each rank has"]
    return drawn + _render_table("Groups", head, rows, text_columns=(3, 5, 6), is_open=True)


def _render_traffic(plot_data: PlotData) -> str:
    rows, node = collect_traffic(plot_data), plot_data.device.node
    if not rows:
        return '<p class="quiet">No rank sends anything.</p>'
    summary = (
        f"Bytes that one device sends in a step, by group: within its node ({node.intra_node.bandwidth / 1e9:,.0f} "
        f"GB/s), and to other nodes ({node.inter_node.bandwidth / 1e9:,.0f} GB/s). Collectives are counted as on a "
        "ring. Times are how long the stream is busy, and the share of it that overlaps with computing."
    )
    cells = []
    for each in rows:
        row = [
            f"{each.rank}",
            each.stream,
            f"{each.num_ranks:,}",
            f"{each.num_calls:,}",
            format_size(each.intra_node_bytes),
        ]
        cells.append(
            [*row, format_size(each.inter_node_bytes), format_seconds(each.seconds), f"{each.overlap_fraction:.0%}"]
        )
    head = ["rank", "group", "ranks", "calls", *LINK_NAMES.values(), "busy", "overlapped"]
    table = _render_table("Traffic of the ranks that are drawn", head, cells, text_columns=(1,))
    return f'<p class="quiet">{summary}</p>{_wrap_scrollable(figures.draw_links(select_busiest(rows)).to_svg())}{table}'


def _render_layouts(plot_data: PlotData) -> str:
    found, best = plot_data.layouts, find_pareto_frontier(plot_data.layouts)
    order = sorted(found, key=lambda each: (not each["fits"], each["step_seconds"]))
    rows = []
    for each in order[:MAX_TABLE_ROWS]:
        fits, is_best = "fits" if each["fits"] else "does not fit", "yes" if each in best else ""
        row = [each["label"], format_seconds(each["step_seconds"]), format_size(each["peak_reserved_bytes"])]
        rows.append([*row, fits, is_best])
    fitting = sum(1 for each in found if each["fits"])
    summary = f"{len(found):,} layouts, of which {fitting:,} fit. The line is the Pareto frontier of time and memory."
    shown = figures.select_layouts(found)
    if len(shown) < len(found):
        summary += f" The plot shows {len(shown):,}: the frontier and the fastest others."
    caption = "All layouts" if len(order) <= MAX_TABLE_ROWS else f"The first {MAX_TABLE_ROWS} of {len(order):,}"
    table = _render_table(
        f"{caption}: first those that fit, then by step time",
        ["layout", "step time", "reserved", "fits", "frontier"],
        rows,
    )
    return (
        '<section id="layouts-section" aria-labelledby="layouts-head"><h2 id="layouts-head">Layouts: memory and '
        f"step time</h2><p "
        f'class="quiet">{summary}</p>{_wrap_scrollable(figures.draw_layouts(plot_data).to_svg())}{table}</section>'
    )


def _wrap_scrollable(content: str) -> str:
    return f'<div class="wide">{content}</div>'


def _render_table(
    caption: str,
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    text_columns: Sequence[int] = (),
    is_open: bool = False,
) -> str:
    """Return a table, in a collapsed element unless `is_open`; the columns `text_columns` hold text."""
    kinds = ["text" if column in text_columns else "" for column in range(len(head))]
    top = "".join(f'<th scope="col" class="{kind}">{escape(name)}</th>' for name, kind in zip(head, kinds, strict=True))
    body = []
    for row in rows:
        cells = [f'<td class="{kind}">{escape(cell)}</td>' for cell, kind in zip(row, kinds, strict=True)]
        body.append("<tr>" + f'<th scope="row">{escape(row[0])}</th>' + "".join(cells[1:]) + "</tr>")
    inner = _wrap_scrollable(
        f"<table><caption>{escape(caption)}</caption><thead><tr>{top}</tr></thead><tbody>{''.join(body)}</tbody></table>"
    )
    return inner if is_open else f"<details><summary>Show as a table</summary>{inner}</details>"

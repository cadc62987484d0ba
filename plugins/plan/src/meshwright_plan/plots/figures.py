"""Static plots of a plan: map of the mesh, traffic over links, and layouts by time and memory.

[Note: mesh map] Axes are drawn as nested boxes. Ranks fill nodes in order, so a node is a box too. An axis that spans
nodes is drawn as two levels: within nodes and between them. Of several equal boxes, only the first shows its contents.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshwright.plugin import ROOT_AXES, VIEWS, Degrees

from ..config import DeviceSpec
from ..tables import format_seconds, format_size
from ..timeline import find_group_ranks
from .marks import Dot, Mark, MarkStyle, Picture, Polyline, Rect, Text, build_legend
from .plot_data import (
    INTER_NODE,
    INTRA_NODE,
    LINK_NAMES,
    LINKS,
    PlotData,
    StreamTraffic,
    find_link,
    find_pareto_frontier,
)

NODE, TIMES, DASH = "node", "\N{MULTIPLICATION SIGN}", "\N{EN DASH}"
GROUP_DESCRIPTIONS = {
    "pp": "different blocks of the model; activations are sent to the next stage, gradients to the previous one",
    "dp_replicate": "the same parameters; gradients are summed",
    "dp_shard": "a shard of each parameter, gathered before use; gradients are reduced and scattered",
    "cp": "a part of each sequence; keys and values are exchanged",
    "tp": "a slice of each weight matrix; activations are gathered or summed",
    "ep": "different experts; tokens are sent to the ranks of their experts",
    "ep_shard": "a shard of the same experts",
    "dp": "different rows of a batch",
    "dp_cp": "different tokens of a batch; losses and token counts are summed",
    "dp_shard_cp": "a shard of each parameter, gathered before use; gradients are reduced and scattered",
}
MAX_RANKS_DRAWN = 32  # Up to this many ranks, every rank is drawn
HEADER_HEIGHT, GAP, PADDING, MAX_ROW_WIDTH = 20, 6, 8, 960
LETTER_WIDTH = 7.2  # in pixels


@dataclass(frozen=True)
class MeshLevel:
    """One level of nested boxes: an axis, its part within or between nodes, or a node (`NODE`, with an empty link)."""

    axis: str
    count: int  # number of boxes
    ranks: int  # number of ranks in each box
    link: str = ""


@dataclass(frozen=True)
class RankGroup:
    """Group of ranks along an axis or view of the mesh."""

    name: str
    ranks: tuple[int, ...]
    num_groups: int  # number of groups along the axis
    num_nodes: int  # number of nodes that this group spans
    link: str
    description: str


def build_levels(degrees: Degrees, device: DeviceSpec, axes: Sequence[str] = ROOT_AXES) -> list[MeshLevel]:
    """Return the levels of the mesh, outermost first; axes of size 1 are left out."""
    node, world = device.node.ranks, degrees.world_size
    found, inner = [], world
    for axis in axes:
        count, outer = getattr(degrees, axis), inner
        inner //= count
        if count == 1:
            continue
        if inner < node < outer and node % inner == 0 == outer % node:
            found += [MeshLevel(axis, outer // node, node, INTER_NODE), MeshLevel(NODE, 1, node)]
            found.append(MeshLevel(axis, node // inner, inner, INTRA_NODE))
        else:
            is_inside = world <= node or (outer <= node and node % outer == 0)
            found.append(MeshLevel(axis, count, inner, INTRA_NODE if is_inside else INTER_NODE))
            found += [MeshLevel(NODE, 1, node)] * (inner == node)
    return [MeshLevel(NODE, 1, world), *found] if world <= node else found


def list_rank_groups(degrees: Degrees, device: DeviceSpec, rank: int) -> list[RankGroup]:
    """Return the groups that a rank belongs to, along all axes and views; groups of one rank are left out."""
    found = []
    for name in [*ROOT_AXES, *VIEWS, *(["ep_shard", "ep"] if degrees.ep > 1 else [])]:
        ranks = find_group_ranks(name, rank, degrees, get_group_size(name, degrees))
        axes_above_one = [axis for axis in VIEWS.get(name, (name,)) if getattr(degrees, axis) > 1]
        if len(ranks) > 1 and (name not in VIEWS or len(axes_above_one) > 1):
            nodes = len({each // device.node.ranks for each in ranks})
            count = degrees.world_size // len(ranks)
            found.append(
                RankGroup(name, tuple(ranks), count, nodes, find_link(ranks, device), GROUP_DESCRIPTIONS[name])
            )
    return found


def get_group_size(name: str, degrees: Degrees) -> int:
    """Return the number of ranks in a group along an axis or view."""
    return math.prod(getattr(degrees, axis) for axis in VIEWS.get(name, (name,)))


@dataclass(frozen=True)
class Box:
    """A rectangle of the mesh map, in pixels."""

    x: float
    y: float
    width: float
    height: float
    kind: str  # "level", "node", "rank", "block" (ranks not drawn one by one) or "more" (several such blocks)
    text: str
    link: str = ""  # only for levels


def build_boxes(degrees: Degrees, device: DeviceSpec, axes: Sequence[str] = ROOT_AXES) -> list[Box]:
    """Return the rectangles of the mesh map; the first encloses all others."""
    return _draw_block(build_levels(degrees, device, axes), 0, degrees, device)


def _draw_block(rest: Sequence[MeshLevel], first: int, degrees: Degrees, device: DeviceSpec) -> list[Box]:
    """Draw the levels `rest`, from rank `first`."""
    if not rest:
        return [Box(0, 0, 8 + LETTER_WIDTH * max(4, len(f"{degrees.world_size - 1}")), 24, "rank", f"{first}")]
    level, inner = rest[0], rest[1:]
    if level.axis == NODE:
        text = f"node {first // device.node.ranks}"
        return _frame_boxes([_draw_block(inner, first, degrees, device)], "node", text, "")
    part = getattr(degrees, level.axis)
    split = "" if part == level.count else f" of {part:,}"
    children = list(_draw_children(level, inner, first, degrees, device))
    return _frame_boxes(children, "level", f"{level.axis} {TIMES} {level.count:,}{split}", level.link)


def _draw_children(
    level: MeshLevel, inner: Sequence[MeshLevel], first: int, degrees: Degrees, device: DeviceSpec
) -> Iterator[list[Box]]:
    has_all = degrees.world_size <= MAX_RANKS_DRAWN
    most = level.count if has_all else (8 if not inner else 3)
    shown = list(range(level.count)) if level.count <= most + 1 else [*range(most - 1), level.count - 1]
    before = -1
    for index in shown:
        begin = first + index * level.ranks
        if index > before + 1:
            yield [_draw_placeholder("more", f"{TIMES} {index - before - 1:,} more")]
        if index == 0 or has_all or not inner:
            yield _draw_block(inner, begin, degrees, device)
        else:
            is_node = inner[0].axis == NODE
            name = f"node {begin // device.node.ranks}" if is_node else f"{level.axis} {index}"
            yield [_draw_placeholder("block", f"{name}: {begin}{DASH}{begin + level.ranks - 1}")]
        before = index


def _draw_placeholder(kind: str, text: str) -> Box:
    return Box(0, 0, 2 * PADDING + LETTER_WIDTH * len(text), 30, kind, text)


def _frame_boxes(children: Sequence[list[Box]], kind: str, text: str, link_name: str) -> list[Box]:
    """Arrange blocks in a row, or in a column if the row would be too wide, and add a frame with a title."""
    widths, heights = [each[0].width for each in children], [each[0].height for each in children]
    is_row = sum(widths) + GAP * (len(widths) - 1) <= MAX_ROW_WIDTH
    x, y, found = float(PADDING), float(HEADER_HEIGHT), []
    for own in children:
        if own[0].kind in ("block", "more"):
            own = [replace(own[0], height=max(heights)) if is_row else replace(own[0], width=max(widths))]
        found += [replace(box, x=box.x + x, y=box.y + y) for box in own]
        x, y = (x + own[0].width + GAP, y) if is_row else (x, y + own[0].height + GAP)
    width = max(box.x + box.width for box in found) + PADDING
    height = max(box.y + box.height for box in found) + PADDING
    return [Box(0, 0, max(width, 2 * PADDING + LETTER_WIDTH * len(text)), height, kind, text, link_name), *found]


WIDTH = 960
MAX_LAYOUTS_DRAWN = 1500
LINK_LEGEND = [(f"link-{find_link}", LINK_NAMES[find_link]) for find_link in LINKS]
_AXIS, _GRID = MarkStyle(stroke="quiet"), MarkStyle(stroke="line")
_LIMIT = MarkStyle(stroke="limit", width=2, dash=(7, 4))
_FITS, _BEST = MarkStyle(stroke="fit-fits", width=1.6), MarkStyle(fill="fit-fits", stroke="fit-fits", width=1.6)
_TOO_LARGE = MarkStyle(stroke="fit-too-large", width=1.6)
_FRONTIER = MarkStyle(stroke="fit-fits", width=1.5, dash=(3, 3))
_BOXES = {
    "node": MarkStyle("panel", "quiet", 2),
    "rank": MarkStyle("ground", "quiet", 1.4),
    "block": MarkStyle("ground", "quiet", 1.4),
    "more": MarkStyle("none", "quiet", 1.4, (3, 3)),
}


def draw_mesh(plot_data: PlotData, axes: Sequence[str] = ROOT_AXES, name: str = "mesh-map", title: str = "") -> Picture:
    """Draw the mesh as nested boxes; see [Note: mesh map]."""
    found = build_boxes(plot_data.degrees, plot_data.device, axes)
    marks: list[Mark] = []
    for box in found:
        colour = f"link-{box.link}" if box.link else "text"
        style = _BOXES.get(box.kind, MarkStyle(colour, colour, 1.4, opacity=0.09))
        marks.append(Rect(box.x + 0.5, box.y + 0.5, box.width - 1, box.height - 1, style, radius=4))
        if box.kind in ("level", "node"):
            marks.append(Text(box.x + 8, box.y + HEADER_HEIGHT - 6, box.text, colour, 12, is_bold=True))
        else:
            middle = box.x + box.width / 2, box.y + box.height / 2 + 4
            marks.append(Text(*middle, box.text, "quiet" if box.kind == "more" else "text", 11.5, "middle"))
    title = title or f"{plot_data.degrees} on nodes of {plot_data.device.node.ranks} ranks, as nested boxes"
    below = found[0].height + 8
    marks += build_legend(LINK_LEGEND, 4, below)
    return Picture(name, title, max(400.0, found[0].width), below + 18, marks)


def draw_links(rows: Sequence[StreamTraffic]) -> Picture:
    """Draw two bars for each stream of a rank: bytes sent within its node and to other nodes."""
    left, right, row, top = 190, 350, 46, 8
    most = max((max(each.intra_node_bytes, each.inter_node_bytes) for each in rows), default=0) or 1.0
    scale = (WIDTH - left - right) / most
    marks: list[Mark] = [Polyline([(left, top), (left, top + row * len(rows))], _AXIS)]
    for index, each in enumerate(rows):
        y = top + index * row
        marks.append(Text(left - 12, y + 17, each.stream, anchor="end", is_bold=True))
        marks.append(
            Text(left - 12, y + 33, f"{each.num_ranks:,} ranks, {each.num_calls:,} calls", size=12, anchor="end")
        )
        for offset, side, size in ((5, INTRA_NODE, each.intra_node_bytes), (21, INTER_NODE, each.inter_node_bytes)):
            if size:
                words = f"{format_size(size)} {LINK_NAMES[side]}"
                length = max(1.5, size * scale)
                tip = f"{each.stream}: {words}"
                marks.append(Rect(left, y + offset, length, 13, MarkStyle(f"link-{side}"), tip))
                marks.append(Text(left + length + 6, y + offset + 11, words, size=12))
        took = f"{format_seconds(each.seconds)}, {each.overlap_fraction:.0%} hidden"
        marks.append(Text(WIDTH - 4, y + 25, took, size=12, anchor="end", is_bold=True))
    return Picture("links", f"Bytes over each link, rank {rows[0].rank}", WIDTH, top * 2 + row * len(rows), marks)


# -- layouts


class _Axes:
    """Axes of the plot of layouts: seconds, logarithmic if they span more than a factor of 8, and bytes."""

    left, top, right, bottom = 76, 16, WIDTH - 24, 400

    def __init__(self, seconds: Sequence[float], sizes: Sequence[float]) -> None:
        low, high = min(seconds), max(seconds)
        self.is_log = high > 8 * low > 0
        margin = 0.04 * (high - low) or 0.05 * high
        self.seconds = (low / 1.15, high * 1.15) if self.is_log else (max(0.0, low - margin), high + margin)
        self.max_bytes = max(sizes) * 1.06

    def x(self, seconds: float) -> float:
        low, high, value = (math.log(each) if self.is_log else each for each in (*self.seconds, seconds))
        return self.left + (value - low) / (high - low) * (self.right - self.left)

    def y(self, size: float) -> float:
        return self.bottom - size / self.max_bytes * (self.bottom - self.top)

    def marks(self) -> Iterator[Mark]:
        size_unit, one_size = ("GiB", 2**30) if self.max_bytes > 2 * 2**30 else ("MiB", 2**20)
        for size in _choose_ticks(0, self.max_bytes / one_size):
            y = self.y(size * one_size)
            yield Polyline([(self.left, y), (self.right, y)], _GRID)
            yield Text(self.left - 8, y + 4, f"{size:g}", "quiet", anchor="end")
        unit, one = ("s", 1.0) if self.seconds[1] > 1 else ("ms", 1e-3)
        for time in _choose_ticks(*(each / one for each in self.seconds), is_log=self.is_log):
            x = self.x(time * one)
            yield Polyline([(x, self.top), (x, self.bottom)], _GRID)
            yield Text(x, self.bottom + 18, f"{time:g}", "quiet", anchor="middle")
        middle = (self.left + self.right) / 2, (self.top + self.bottom) / 2
        yield Text(middle[0], self.bottom + 38, f"step time [{unit}]", "quiet", anchor="middle")
        yield Text(18, middle[1], f"memory reserved at the peak [{size_unit}]", "quiet", anchor="middle", rotation=-90)


def _choose_ticks(low: float, high: float, *, is_log: bool = False) -> list[float]:
    from matplotlib.ticker import LogLocator, MaxNLocator

    locator = LogLocator(subs=(1, 2, 5)) if is_log else MaxNLocator(6, steps=[1, 2, 2.5, 5, 10])
    return [float(each) for each in locator.tick_values(low, high) if low <= each <= high]


def select_layouts(layouts: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return at most `MAX_LAYOUTS_DRAWN` layouts: those on the Pareto frontier, then the fastest."""
    best = find_pareto_frontier(layouts)
    others = sorted((each for each in layouts if each not in best), key=lambda each: each["step_seconds"])
    return [*best, *others[: MAX_LAYOUTS_DRAWN - len(best)]]


def draw_layouts(plot_data: PlotData) -> Picture:
    """Draw layouts as circles, or as crosses if they do not fit, and a line through the Pareto frontier."""
    found, limit = plot_data.layouts, plot_data.usable_bytes
    shown, best = select_layouts(found), find_pareto_frontier(found)
    edge = 1.7 * limit
    sizes = [min(edge, each["peak_reserved_bytes"]) for each in shown]
    is_limit_near = 4 * max(sizes) > limit  # otherwise, the layouts would be a line at the bottom
    axes = _Axes([each["step_seconds"] for each in shown], [*sizes, *([limit] if is_limit_near else [])])
    points = [(axes.x(each["step_seconds"]), axes.y(each["peak_reserved_bytes"])) for each in best]
    limit_y = axes.y(limit) if is_limit_near else axes.top
    marks = [*axes.marks()]
    if is_limit_near:
        marks.append(Polyline([(axes.left, limit_y), (axes.right, limit_y)], _LIMIT))
    marks.append(Polyline(points, _FRONTIER))
    for each, size in reversed(list(zip(shown, sizes, strict=True))):
        beyond = "" if size < edge else ", beyond the range shown"
        fits = "fits" if each["fits"] else "does not fit"
        words = (
            f"{each['label']}: {format_seconds(each['step_seconds'])}, "
            f"{format_size(each['peak_reserved_bytes'])}, {fits}"
        )
        style, radius = (_BEST, 6) if each in best else (_FITS, 4) if each["fits"] else (_TOO_LARGE, 4)
        centre = axes.x(each["step_seconds"]), axes.y(size)
        marks.append(Dot(*centre, radius, style, words + beyond, is_cross=not each["fits"]))
    words = f"usable {format_size(limit)}{'' if is_limit_near else ': above the range shown'}"
    marks.append(Text(axes.right - 6, limit_y - 4, words, "limit", anchor="end", has_halo=True))
    marks += _label_layouts(best, points)
    x, below = float(axes.left), axes.bottom + 58
    for style, words, is_cross in (
        (_BEST, "frontier", False),
        (_FITS, "fits", False),
        (_TOO_LARGE, "too large", True),
    ):
        marks += [Dot(x + 6, below, 5, style, is_cross=is_cross), Text(x + 17, below + 4, words)]
        x += 110
    return Picture("layouts", f"Layouts by time and memory: {len(found):,}", WIDTH, axes.bottom + 72, marks)


def _label_layouts(best: Sequence[Mapping[str, Any]], points: Sequence[tuple[float, float]]) -> Iterator[Text]:
    """Label the best layouts where labels do not overlap; names that are too long are cut."""
    last = -math.inf
    for each, (x, y) in zip(best, points, strict=True):
        if y - last > 18:
            is_left = x > WIDTH * 0.6
            room = min(52, int((x - _Axes.left if is_left else _Axes.right - x) / 6.6))
            name = each["label"] if len(each["label"]) <= room else each["label"][: room - 1].rstrip(" ,") + "…"
            shift, anchor = (-10, "end") if is_left else (10, "start")
            yield Text(x + shift, y - 6, name, "text", 12, anchor, has_halo=True)
            last = y

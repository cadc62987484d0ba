"""Still pictures of a plan: the map of a mesh, bytes over links, layouts by time and memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from meshwright.plugin import ROOT_AXES

from ..report import size_text, time_text
from .marks import Dot, Line, Mark, Picture, Rect, Style, Text, legend
from .mesh_map import HEAD, boxes
from .series import BETWEEN, INSIDE, LINKS
from .shown import LINK_NAMES, Shown, Traffic, frontier

WIDTH = 960
MOST_LAYOUTS = 1500
LINK_SIGNS = [(f"link-{link}", LINK_NAMES[link]) for link in LINKS]
_AXIS, _GRID = Style(stroke="quiet"), Style(stroke="line")
_LIMIT = Style(stroke="limit", width=2, dash=(7, 4))
_FITS, _BEST = Style(stroke="fit-fits", width=1.6), Style(fill="fit-fits", stroke="fit-fits", width=1.6)
_TOO_LARGE, _FRONTIER = Style(stroke="fit-too-large", width=1.6), Style(stroke="fit-fits", width=1.5, dash=(3, 3))
_BOXES = {
    "node": Style("panel", "quiet", 2),
    "rank": Style("ground", "quiet", 1.4),
    "block": Style("ground", "quiet", 1.4),
    "more": Style("none", "quiet", 1.4, (3, 3)),
}


def mesh(subject: Shown, axes: Sequence[str] = ROOT_AXES, name: str = "mesh-map", title: str = "") -> Picture:
    """Draw the mesh as blocks within blocks; see `mesh_map`."""
    found = boxes(subject.degrees, subject.device, axes)
    marks: list[Mark] = []
    for box in found:
        colour = f"link-{box.link}" if box.link else "text"
        style = _BOXES.get(box.kind, Style(colour, colour, 1.4, opacity=0.09))
        marks.append(Rect(box.x + 0.5, box.y + 0.5, box.width - 1, box.height - 1, style, radius=4))
        if box.kind in ("level", "node"):
            marks.append(Text(box.x + 8, box.y + HEAD - 6, box.text, colour, 12, is_bold=True))
        else:
            middle = box.x + box.width / 2, box.y + box.height / 2 + 4
            marks.append(Text(*middle, box.text, "quiet" if box.kind == "more" else "text", 11.5, "middle"))
    title = title or f"{subject.degrees} on nodes of {subject.device.node.ranks} ranks, as blocks within blocks"
    below = found[0].height + 8
    marks += legend(LINK_SIGNS, 4, below)
    return Picture(name, title, max(400.0, found[0].width), below + 18, marks)


def links(rows: Sequence[Traffic]) -> Picture:
    """Draw two bars for each stream of a rank: what it sends inside of its node, and to other nodes."""
    left, right, row, top = 190, 350, 46, 8
    most = max((max(each.inside, each.between) for each in rows), default=0) or 1.0
    scale = (WIDTH - left - right) / most
    marks: list[Mark] = [Line([(left, top), (left, top + row * len(rows))], _AXIS)]
    for place, each in enumerate(rows):
        y = top + place * row
        marks.append(Text(left - 12, y + 17, each.stream, anchor="end", is_bold=True))
        marks.append(Text(left - 12, y + 33, f"{each.ranks:,} ranks, {each.calls:,} calls", size=12, anchor="end"))
        for offset, link, size in ((5, INSIDE, each.inside), (21, BETWEEN, each.between)):
            if size:
                words = f"{size_text(size)} {LINK_NAMES[link]}"
                length = max(1.5, size * scale)
                tip = f"{each.stream}: {words}"
                marks.append(Rect(left, y + offset, length, 13, Style(f"link-{link}"), tip))
                marks.append(Text(left + length + 6, y + offset + 11, words, size=12))
        took = f"{time_text(each.seconds)}, {each.hidden:.0%} hidden"
        marks.append(Text(WIDTH - 4, y + 25, took, size=12, anchor="end", is_bold=True))
    return Picture("links", f"Bytes over each link, of rank {rows[0].rank}", WIDTH, top * 2 + row * len(rows), marks)


# -- layouts


class _Axes:
    """Place seconds (their logarithms if they differ by more than 8 times) and bytes."""

    left, top, right, bottom = 76, 16, WIDTH - 24, 400

    def __init__(self, seconds: Sequence[float], sizes: Sequence[float]) -> None:
        low, high = min(seconds), max(seconds)
        self.is_log = high > 8 * low > 0
        margin = 0.04 * (high - low) or 0.05 * high
        self.seconds = (low / 1.15, high * 1.15) if self.is_log else (max(0.0, low - margin), high + margin)
        self.most = max(sizes) * 1.06

    def x(self, seconds: float) -> float:
        low, high, value = (math.log(each) if self.is_log else each for each in (*self.seconds, seconds))
        return self.left + (value - low) / (high - low) * (self.right - self.left)

    def y(self, size: float) -> float:
        return self.bottom - size / self.most * (self.bottom - self.top)

    def marks(self) -> Iterator[Mark]:
        for gib in _ticks(0, self.most / 2**30):
            y = self.y(gib * 2**30)
            yield Line([(self.left, y), (self.right, y)], _GRID)
            yield Text(self.left - 8, y + 4, f"{gib:g}", "quiet", anchor="end")
        for seconds in _ticks(*self.seconds, is_log=self.is_log):
            x = self.x(seconds)
            yield Line([(x, self.top), (x, self.bottom)], _GRID)
            yield Text(x, self.bottom + 18, f"{seconds:g}", "quiet", anchor="middle")
        middle = (self.left + self.right) / 2, (self.top + self.bottom) / 2
        yield Text(middle[0], self.bottom + 38, "seconds of a step", "quiet", anchor="middle")
        yield Text(18, middle[1], "memory reserved at the peak [GiB]", "quiet", anchor="middle", turn=-90)


def _ticks(low: float, high: float, *, is_log: bool = False) -> list[float]:
    """Return some six round values of a range."""
    from matplotlib.ticker import LogLocator, MaxNLocator

    locator = LogLocator(subs=(1, 2, 5)) if is_log else MaxNLocator(6, steps=[1, 2, 2.5, 5, 10])
    return [float(each) for each in locator.tick_values(low, high) if low <= each <= high]


def drawn_layouts(layouts: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return all layouts, or of too many those on the frontier and the fastest."""
    best = frontier(layouts)
    others = sorted((each for each in layouts if each not in best), key=lambda each: each["step_seconds"])
    return [*best, *others[: MOST_LAYOUTS - len(best)]]


def layouts(subject: Shown) -> Picture:
    """Draw each layout as a circle if it fits and as a cross if not, with a line through the frontier."""
    found, limit = subject.layouts, subject.limit
    shown, best = drawn_layouts(found), frontier(found)
    edge = 1.7 * limit
    sizes = [min(edge, each["peak_reserved_bytes"]) for each in shown]
    axes = _Axes([each["step_seconds"] for each in shown], [*sizes, limit])
    points = [(axes.x(each["step_seconds"]), axes.y(each["peak_reserved_bytes"])) for each in best]
    marks = [*axes.marks(), Line([(axes.left, axes.y(limit)), (axes.right, axes.y(limit))], _LIMIT)]
    marks.append(Line(points, _FRONTIER))
    for each, size in reversed(list(zip(shown, sizes, strict=True))):
        beyond = "" if size < edge else ", drawn at the edge"
        fits = "fits" if each["fits"] else "does not fit"
        words = f"{each['label']}: {time_text(each['step_seconds'])}, {size_text(each['peak_reserved_bytes'])}, {fits}"
        style, radius = (_BEST, 6) if each in best else (_FITS, 4) if each["fits"] else (_TOO_LARGE, 4)
        place = axes.x(each["step_seconds"]), axes.y(size)
        marks.append(Dot(*place, radius, style, words + beyond, is_cross=not each["fits"]))
    usable = axes.right - 6, axes.y(limit) - 7
    marks.append(Text(*usable, f"usable {size_text(limit)}", "limit", anchor="end", has_halo=True))
    marks += _names(best, points)
    x, below = float(axes.left), axes.bottom + 58
    for style, words, is_cross in (
        (_BEST, "on the line", False),
        (_FITS, "fits", False),
        (_TOO_LARGE, "too large", True),
    ):
        marks += [Dot(x + 6, below, 5, style, is_cross=is_cross), Text(x + 17, below + 4, words)]
        x += 110
    return Picture("layouts", f"Layouts by time and memory: {len(found):,}", WIDTH, axes.bottom + 72, marks)


def _names(best: Sequence[Mapping[str, Any]], points: Sequence[tuple[float, float]]) -> Iterator[Text]:
    """Label the best layouts where labels do not overlap, with as much of each name as there is room for."""
    last = -math.inf
    for each, (x, y) in zip(best, points, strict=True):
        if y - last > 18:
            is_left = x > WIDTH * 0.6
            room = min(52, int((x - _Axes.left if is_left else _Axes.right - x) / 6.6))
            name = each["label"] if len(each["label"]) <= room else each["label"][: room - 1].rstrip(" ,") + "…"
            yield Text(
                x + (-10 if is_left else 10), y - 6, name, "text", 12, "end" if is_left else "start", has_halo=True
            )
            last = y

"""Pictures as SVG that need no script: the map of a mesh, bytes over links, layouts by time and memory.

Their colours are classes of the page's style.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from .mesh_map import HEAD, Box
from .series import BETWEEN, INSIDE
from .shown import LINK_NAMES, Traffic, frontier
from .units import size_text, ticks, time_text

WIDTH = 960
MOST_LAYOUTS = 1500


def svg(width: float, height: float, name: str, title: str, parts: Iterable[str]) -> str:
    """An image with a title, which is read aloud."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'role="img" aria-labelledby="{name}-title" id="{name}"><title id="{name}-title">{escape(title)}</title>'
        f"{''.join(parts)}</svg>"
    )


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def rect(x: float, y: float, width: float, height: float, kind: str, tip: str = "", radius: float = 0) -> str:
    inner = f"<title>{escape(tip)}</title>" if tip else ""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(0.0, width):.1f}" height="{height:.1f}" rx="{radius:g}" '
        f'class="{kind}">{inner}</rect>'
    )


# -- the map


def mesh(boxes: Sequence[Box], name: str, title: str) -> str:
    around = boxes[0]
    parts = []
    for box in boxes:
        kind = f"box {box.kind}" + (f" link-{box.link}" if box.link else "")
        parts.append(rect(box.x + 0.5, box.y + 0.5, box.width - 1, box.height - 1, kind, radius=4))
        if box.kind in ("level", "node"):
            parts.append(text(box.x + 8, box.y + HEAD - 6, box.text, f"head {kind}"))
        else:
            words = text(box.x + box.width / 2, box.y + box.height / 2 + 4, box.text, f"label {box.kind}", "middle")
            parts.append(words)
    return svg(around.width, around.height, name, title, parts)


# -- links


def links(rows: Sequence[Traffic], title: str) -> str:
    """Two bars for each stream of a rank: what goes over links inside of its node, and to other nodes."""
    left, right, row, top = 190, 350, 46, 8
    most = max((max(each.inside, each.between) for each in rows), default=0) or 1.0
    scale = (WIDTH - left - right) / most
    parts = [line(left, top, left, top + row * len(rows), "axis")]
    for place, each in enumerate(rows):
        y = top + place * row
        name = each.stream
        parts.append(text(left - 12, y + 17, name, "strong", "end"))
        parts.append(text(left - 12, y + 33, f"{each.ranks:,} ranks, {each.calls:,} calls", "small", "end"))
        for offset, link, size in ((5, INSIDE, each.inside), (21, BETWEEN, each.between)):
            if size:
                words = f"{size_text(size)} {LINK_NAMES[link]}"
                length = max(1.5, size * scale)
                parts.append(rect(left, y + offset, length, 13, f"link-{link}", f"{name}: {words}"))
                parts.append(text(left + length + 6, y + offset + 11, words, "small"))
        took = f"{time_text(each.seconds)}, {each.hidden:.0%} hidden"
        parts.append(text(WIDTH - 4, y + 25, took, "small strong", "end"))
    return svg(WIDTH, top * 2 + row * len(rows), "links", title, parts)


# -- layouts


class _Axes:
    """Where seconds (of a logarithm, where they differ much) and bytes are."""

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

    def drawn(self) -> list[str]:
        parts = []
        for gib in ticks(0, self.most / 2**30):
            y = self.y(gib * 2**30)
            parts += [line(self.left, y, self.right, y, "grid"), text(self.left - 8, y + 4, f"{gib:g}", "tick", "end")]
        for seconds in self.time_ticks():
            x = self.x(seconds)
            parts.append(line(x, self.top, x, self.bottom, "grid"))
            parts.append(text(x, self.bottom + 18, f"{seconds:g}", "tick", "middle"))
        parts.append(text((self.left + self.right) / 2, self.bottom + 38, "seconds of a step", "tick", "middle"))
        parts.append(f'<text transform="translate(18 {(self.top + self.bottom) / 2}) rotate(-90)" class="tick" ')
        parts.append('text-anchor="middle">memory reserved at the peak [GiB]</text>')
        return parts

    def time_ticks(self) -> list[float]:
        low, high = self.seconds
        if not self.is_log:
            return ticks(low, high)
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        return [each for each in (10.0**p * d for p in powers for d in (1, 2, 5)) if low <= each <= high]


LETTER, MOST_LETTERS = 6.6, 52
"""How wide one is drawn, and how many of a layout's name."""


def drawn_layouts(layouts: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """All of them, or those on the frontier and the fastest."""
    best = frontier(layouts)
    others = sorted((each for each in layouts if each not in best), key=lambda each: each["step_seconds"])
    return [*best, *others[: MOST_LAYOUTS - len(best)]]


def layouts(found: Sequence[Mapping[str, Any]], limit: int, title: str) -> str:
    """Each layout as a point, those that fit as circles and others as crosses; a line through the best."""
    shown, best = drawn_layouts(found), frontier(found)
    # What is far too large is drawn at the edge.
    edge = 1.7 * limit
    sizes = [min(edge, each["peak_reserved_bytes"]) for each in shown]
    axes = _Axes([each["step_seconds"] for each in shown], [*sizes, limit])
    parts = axes.drawn()
    parts.append(line(axes.left, axes.y(limit), axes.right, axes.y(limit), "limit"))
    points = [(axes.x(each["step_seconds"]), axes.y(each["peak_reserved_bytes"])) for each in best]
    parts.append(f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}" class="frontier"/>')
    for each, size in reversed(list(zip(shown, sizes, strict=True))):
        x, y = axes.x(each["step_seconds"]), axes.y(size)
        beyond = "" if size < edge else ", drawn at the edge"
        fits = "fits" if each["fits"] else "does not fit"
        words = f"{each['label']}: {time_text(each['step_seconds'])}, {size_text(each['peak_reserved_bytes'])}, {fits}"
        parts.append(_point(x, y, each["fits"], each in best, escape(words + beyond)))
    parts.append(text(axes.right - 6, axes.y(limit) - 7, f"usable {size_text(limit)}", "limit halo", "end"))
    parts += _names(best, points)
    return svg(WIDTH, axes.bottom + 50, "layouts", title, parts)


def _point(x: float, y: float, fits: bool, is_best: bool, words: str) -> str:
    if fits:
        kind, radius = ("fit-fits best", 6) if is_best else ("fit-fits", 4)
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" class="{kind}"><title>{words}</title></circle>'
    return f'<path d="M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8" class="fit-too-large"><title>{words}</title></path>'


def _names(best: Sequence[Mapping[str, Any]], points: Sequence[tuple[float, float]]) -> Iterable[str]:
    """Labels of the best, where they do not run into each other; as much of each as there is room for."""
    last = -math.inf
    for each, (x, y) in zip(best, points, strict=True):
        if y - last > 18:
            is_left = x > WIDTH * 0.6
            room = min(MOST_LETTERS, int((x - _Axes.left if is_left else _Axes.right - x) / LETTER))
            name = each["label"] if len(each["label"]) <= room else each["label"][: room - 1].rstrip(" ,") + "…"
            yield text(x + (-10 if is_left else 10), y - 6, name, "small halo", "end" if is_left else "start")
            last = y

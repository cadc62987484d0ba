"""Colours and marks of static plots, which are rendered as SVG in the page and painted into PNG files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TypeAlias

BASE_COLOURS = {
    "ground": ("#ffffff", "#14171c"),
    "panel": ("#f4f6f8", "#1c2128"),
    "text": ("#1c2330", "#e6e9ee"),
    "quiet": ("#586173", "#a3adbb"),
    "line": ("#d5dae1", "#343b46"),
    "limit": ("#b3261e", "#ff8a80"),
    "good": ("#1a7f4b", "#5fd39a"),
    "focus": ("#1d5fd0", "#8ab4ff"),
}
"""Colours for a light and a dark background. Contrast with the background is at least 3, for text at least 4.5 (WCAG
2.2, 1.4.3 and 1.4.11)."""
OWNER_COLOURS = {
    "parameters": ("#2b5c9e", "#6f9fe8"),
    "gradients": ("#7b4ea3", "#b892e6"),
    "optimizer": ("#1f7a74", "#4fb8ae"),
    "gathered": ("#2f8fc9", "#8fd0f5"),
    "activations": ("#c9691a", "#f0a05a"),
    "communication": ("#b8324a", "#f07a8c"),
    "temporary": ("#8a7610", "#d9c050"),
    "other": ("#6b7280", "#9aa3b0"),
}
PHASE_COLOURS = {
    "forward": ("#3f6fc4", "#7aa2ee"),
    "backward": ("#22855a", "#52c08f"),
    "optimizer": ("#a8660f", "#e5ad55"),
}
LINK_COLOURS = {"intra_node": ("#7b4ea3", "#b892e6"), "inter_node": ("#c2410c", "#ff9563")}
FIT_COLOURS = {"fits": ("#1a7f4b", "#5fd39a"), "too large": ("#b3261e", "#ff8a80")}
PALETTES = {
    "": BASE_COLOURS,
    "owner-": OWNER_COLOURS,
    "phase-": PHASE_COLOURS,
    "link-": LINK_COLOURS,
    "fit-": FIT_COLOURS,
}
COLOURS = {
    f"{prefix}{name}".replace(" ", "-"): pair for prefix, each in PALETTES.items() for name, pair in each.items()
}
"""All colours by name, as styles and CSS variables use them."""


def format_css_variables() -> str:
    """Return all colours as CSS variables; the dark ones apply under `prefers-color-scheme: dark`."""
    light, dark = ("".join(f"--{name}:{pair[index]};" for name, pair in COLOURS.items()) for index in (0, 1))
    return f":root{{color-scheme:light dark;{light}}}\n@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"


# -- marks, in pixels from the upper left corner


@dataclass(frozen=True)
class MarkStyle:
    """Style of a mark. Colours are names in `COLOURS`, or "none"; `opacity` applies to the fill."""

    fill: str = "none"
    stroke: str = "none"
    width: float = 1.0
    dash: tuple[float, ...] = ()
    opacity: float = 1.0

    def to_css(self) -> str:
        fill, stroke = (name if name == "none" else f"var(--{name})" for name in (self.fill, self.stroke))
        parts = [f"fill:{fill}"]
        parts += [f"fill-opacity:{self.opacity:g}"] if self.opacity < 1 else []
        parts += [f"stroke:{stroke};stroke-width:{self.width:g}"] if self.stroke != "none" else []
        parts += [f"stroke-dasharray:{' '.join(f'{each:g}' for each in self.dash)}"] if self.dash else []
        return ";".join(parts)


@dataclass(frozen=True)
class Rect:
    x: float
    y: float
    width: float
    height: float
    style: MarkStyle
    tooltip: str = ""
    radius: float = 0

    def to_svg(self) -> str:
        bounds = {"x": self.x, "y": self.y, "width": self.width, "height": self.height, "rx": self.radius}
        return _format_element("rect", self.style, self.tooltip, **bounds)


@dataclass(frozen=True)
class Polyline:
    points: Sequence[tuple[float, float]]
    style: MarkStyle

    def to_svg(self) -> str:
        return _format_element("polyline", self.style, points=" ".join(f"{x:.1f},{y:.1f}" for x, y in self.points))


@dataclass(frozen=True)
class Dot:
    """A circle, or a cross of the same size."""

    x: float
    y: float
    radius: float
    style: MarkStyle
    tooltip: str = ""
    is_cross: bool = False

    def to_svg(self) -> str:
        x, y, r = self.x, self.y, self.radius
        if self.is_cross:
            cross = f"M{x - r:.1f} {y - r:.1f}l{2 * r:g} {2 * r:g}m0 -{2 * r:g}l-{2 * r:g} {2 * r:g}"
            return _format_element("path", self.style, self.tooltip, d=cross)
        return _format_element("circle", self.style, self.tooltip, cx=x, cy=y, r=r)


@dataclass(frozen=True)
class Text:
    """Text whose `anchor` ("start", "middle" or "end" of the baseline) is at `x` and `y`; `rotation` is in degrees."""

    x: float
    y: float
    text: str
    colour: str = "text"
    size: float = 12.5
    anchor: str = "start"
    is_bold: bool = False
    has_halo: bool = False
    rotation: float = 0

    def to_svg(self) -> str:
        position = f'x="{self.x:.1f}" y="{self.y:.1f}"'
        if self.rotation:
            position = f'transform="translate({self.x:.1f} {self.y:.1f}) rotate({self.rotation:g})"'
        style = f"fill:var(--{self.colour});font-size:{self.size:g}px" + (";font-weight:600" if self.is_bold else "")
        halo = ' class="halo"' if self.has_halo else ""
        return f'<text {position}{halo} text-anchor="{self.anchor}" style="{style}">{escape(self.text)}</text>'


Mark: TypeAlias = "Rect | Polyline | Dot | Text"


@dataclass(frozen=True)
class Picture:
    """Marks with a title, which screen readers read aloud; `name` is the id of the SVG element."""

    name: str
    title: str
    width: float
    height: float
    marks: Sequence[Mark]

    def to_svg(self) -> str:
        name, marks = self.name, "".join(each.to_svg() for each in self.marks)
        size = f'viewBox="0 0 {self.width:g} {self.height:g}" width="{self.width:g}"'
        title = f'<title id="{name}-title">{escape(self.title)}</title>'
        described = f'role="img" aria-labelledby="{name}-title" id="{name}"'
        return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {described}>{title}{marks}</svg>'


def build_legend(entries: Iterable[tuple[str, str]], x: float, y: float) -> list[Mark]:
    """Return a row of coloured squares with labels, from pairs (colour, label)."""
    made: list[Mark] = []
    for colour, words in entries:
        made += [Rect(x, y, 13, 13, MarkStyle(fill=colour), radius=3), Text(x + 19, y + 11, words)]
        x += 45 + 7 * len(words)
    return made


def _format_element(tag: str, style: MarkStyle, tooltip: str = "", **attributes: float | str) -> str:
    given = (f'{name}="{each if isinstance(each, str) else format(each, ".1f")}"' for name, each in attributes.items())
    title = f"<title>{escape(tooltip)}</title>" if tooltip else ""
    return f'<{tag} {" ".join(given)} style="{style.to_css()}">{title}</{tag}>'

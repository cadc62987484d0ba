"""Plots of a plan as PNG files. Memory and timeline show the full step; the others are as on the HTML page."""

from __future__ import annotations

from collections.abc import Collection
from itertools import groupby
from pathlib import Path
from typing import Any

from meshwright.plugin import ConfigError

from ..allocator import COMPUTE
from ..tables import format_size
from . import figures
from .marks import COLOURS, Picture, Polyline, Rect, Text
from .plot_data import LINK_NAMES, LINKS, PHASES, Lane, PlotData, collect_traffic, select_busiest

PICTURE_NAMES = ("memory", "timeline", "mesh", "traffic", "layouts")
GIB = 2**30
MIN_STREAM_FRACTION = 1e-3  # Streams that are busy for a smaller fraction of the step are left out
_LIGHT = {name: light for name, (light, _) in COLOURS.items()}
_HALO = {"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 1}
_EDGE = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "ha": "right", "fontsize": 8.5}
"""Style of the labels at the right ends of lines."""


def write_pngs(directory: Path, plot_data: PlotData, names: Collection[str] = PICTURE_NAMES) -> list[Path]:
    """Write each of the plots `names` that has data to a PNG file; return the paths."""
    draw = {
        "memory": lambda: _plot_memory(plot_data),
        "timeline": lambda: _plot_timeline(plot_data),
        "mesh": lambda: _paint(figures.draw_mesh(plot_data), plot_data),
        "traffic": lambda: _paint(figures.draw_links(select_busiest(collect_traffic(plot_data))), plot_data),
        "layouts": lambda: _paint(figures.draw_layouts(plot_data), plot_data),
    }
    missing = {
        name for name, there in (("traffic", collect_traffic(plot_data)), ("layouts", plot_data.layouts)) if not there
    }
    paths = []
    for name in (each for each in PICTURE_NAMES if each in names and each not in missing):
        figure, path = draw[name](), directory / f"{name}.png"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, dpi=120)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror or error}.") from error
        paths.append(path)
    return paths


def _new_figure(width: float, height: float, **options: Any) -> Any:
    # matplotlib's object interface needs neither a display nor global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), **options)
    FigureCanvasAgg(figure)
    return figure


def _paint(picture: Picture, plot_data: PlotData) -> Any:
    """Paint a picture at 96 pixels per inch, below its title."""
    from matplotlib.patches import Circle, FancyBboxPatch
    from matplotlib.patheffects import withStroke

    head, margin, width = 48, 12, max(700.0, picture.width)
    figure = _new_figure((width + 2 * margin) / 96, (picture.height + head + margin) / 96)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(-margin, width + margin), ylim=(picture.height + margin, -head))
    axes.set_axis_off()
    title = ", ".join(filter(None, [plot_data.title, plot_data.device.name, "planned"]))
    marks = [Text(0, -28, picture.title, size=15), Text(0, -10, title, "quiet"), *picture.marks]
    for order, mark in enumerate(marks):
        if isinstance(mark, Text):
            style = {
                "ha": {"start": "left", "middle": "center", "end": "right"}[mark.anchor],
                "rotation": -mark.rotation,
            }
            style |= {"rotation_mode": "anchor", "parse_math": False}
            words = axes.text(mark.x, mark.y, mark.text, fontsize=0.75 * mark.size, color=_LIGHT[mark.colour], **style)
            words.set(zorder=order, weight="bold" if mark.is_bold else "normal")
            words.set_path_effects([withStroke(linewidth=3, foreground="white")] if mark.has_halo else [])
            continue
        line: dict[str, Any] = {
            "linewidth": 0.75 * mark.style.width,
            "linestyle": (0, mark.style.dash) if mark.style.dash else "-",
        }
        fill, edge = (_LIGHT.get(name, "none") for name in (mark.style.fill, mark.style.stroke))
        face = (fill, mark.style.opacity) if fill != "none" else fill
        if isinstance(mark, Rect):
            box = f"round,pad=0,rounding_size={min(mark.radius, mark.width / 2)}" if mark.radius else "square,pad=0"
            bounds = (mark.x, mark.y), mark.width, mark.height
            axes.add_patch(FancyBboxPatch(*bounds, boxstyle=box, fc=face, ec=edge, zorder=order, **line))
        elif isinstance(mark, Polyline):
            xs, ys = [x for x, _ in mark.points], [y for _, y in mark.points]
            axes.plot(xs, ys, color=edge, zorder=order, **line)
        elif mark.is_cross:
            x, y, r = mark.x, mark.y, mark.radius
            for slope in (-1, 1):
                ends = [x - r, x + r], [y - slope * r, y + slope * r]
                axes.plot(*ends, color=edge, linewidth=1.2, zorder=order)
        else:
            axes.add_patch(Circle((mark.x, mark.y), mark.radius, fc=face, ec=edge, zorder=order, **line))
    return figure


# -- the step


def _new_chart(width: float, height: float) -> tuple[Any, Any]:
    figure = _new_figure(width, height, layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    return figure, axes


def _set_title(axes: Any, plot_data: PlotData, title: str, pad: float = 6) -> None:
    note = f" ({plot_data.depth_note})" if plot_data.depth_note else ""
    axes.set_title(
        f"{title}{note}\n{plot_data.title}, {plot_data.device.name}; planned", loc="left", fontsize=10, pad=pad
    )


def _add_legend(figure: Any, entries: dict[str, str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=_LIGHT[colour], label=name) for name, colour in entries.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(8, len(handles)), fontsize=8.5, frameon=False)


def _choose_unit(seconds: float) -> tuple[float, str]:
    return (1.0, "s") if seconds >= 2 else (1e-3, "ms")


def _plot_memory(plot_data: PlotData) -> Any:
    index = max(range(len(plot_data.memory_curves)), key=plot_data.reserved_bytes.__getitem__)
    found, line, taken = plot_data.memory_curves[index], plot_data.timelines[index], plot_data.reserved_bytes[index]
    one, unit = _choose_unit(line.seconds)
    figure, axes = _new_chart(10.5, 5)
    times = [each / one for each in (*found.seconds, line.seconds)]
    series = [[size / GIB for size in (*sizes, sizes[-1])] for sizes in found.bytes_by_owner.values()]
    signs = {owner: f"owner-{owner}" for owner in found.bytes_by_owner}
    axes.stackplot(times, series, colors=[_LIGHT[each] for each in signs.values()], step="post", linewidth=0)
    peak, at = found.totals[found.peak_index], found.seconds[found.peak_index] / one
    dark, limit, most = _LIGHT["text"], plot_data.usable_bytes, max(taken, peak)
    # If two lines are close, label the upper one above it and the lower one below it.
    is_close = 0 <= limit - taken < 0.1 * limit
    lines = [("reserved", taken, dark, 1.2, -11 if is_close else 3)]
    if limit <= 2.2 * most:
        lines.append(("usable", limit, _LIGHT["limit"], 1.6, 3 if is_close else -12))
        most = max(most, limit)
    for name, size, colour, width, above in lines:
        axes.axhline(size / GIB, color=colour, linestyle="--", linewidth=width)
        words = f"{name} {format_size(size)}"
        axes.annotate(words, (1, size / GIB), (-4, above), color=colour, bbox=_HALO, **_EDGE)
    axes.plot([at], [peak / GIB], "o", color="white", markeredgecolor=dark, markersize=6, clip_on=False)
    shift, side = (8, "left") if at < times[-1] / 2 else (-8, "right")
    # Above the line of reserved memory, if the peak is close to it.
    where = (at, (taken if taken - peak < 0.08 * most else peak) / GIB)
    words = f"peak {format_size(peak)}: {found.operators[found.peak_index]}"
    axes.annotate(words, where, (shift, 5), textcoords="offset points", ha=side, fontsize=8.5, bbox=_HALO)
    axes.set(xlim=(0, times[-1]), ylim=(0, most / GIB * 1.1), xlabel=f"time [{unit}]", ylabel="memory held [GiB]")
    axes.grid(axis="y", color=_LIGHT["line"])
    far = "" if limit <= 2.2 * taken else f"; usable {format_size(limit)}, above the range shown"
    _set_title(axes, plot_data, f"Memory over the step, rank {found.rank}{far}", pad=24)
    _draw_phases(
        axes, next(lane for lane in plot_data.lanes if lane.rank == found.rank and lane.stream == COMPUTE), one
    )
    _add_legend(figure, signs)
    return figure


def _draw_phases(axes: Any, lane: Lane, one: float) -> None:
    """Draw the phases above the axes, with names where they fit."""
    low, high = axes.get_xlim()
    across = axes.get_xaxis_transform()
    colours = [_LIGHT[f"phase-{bar.phase}"] for bar in lane.bars]
    ranges = [(bar.start / one, (bar.end - bar.start) / one) for bar in lane.bars]
    axes.broken_barh(ranges, (1.01, 0.04), facecolors=colours, transform=across, clip_on=False, linewidth=0)
    for phase, bars in groupby(lane.bars, key=lambda bar: bar.phase):
        run = list(bars)
        start, end = run[0].start / one, run[-1].end / one
        if end - start > 0.1 * (high - low):
            middle = (start + end) / 2
            axes.text(middle, 1.03, phase, transform=across, ha="center", va="center", fontsize=7.5, color="white")


def _plot_timeline(plot_data: PlotData) -> Any:
    seconds = max(line.seconds for line in plot_data.timelines)
    one, unit = _choose_unit(seconds)
    busy = {id(lane): sum(bar.busy for bar in lane.bars) for lane in plot_data.lanes}
    seen = [
        lane for lane in plot_data.lanes if lane.stream == COMPUTE or busy[id(lane)] > MIN_STREAM_FRACTION * seconds
    ]
    positions, names, y = [], [], 0.0
    for rank, own in groupby(seen, key=lambda lane: lane.rank):
        for number, lane in enumerate(own):
            positions.append(y)
            share = f"{busy[id(lane)] / seconds:.1%}"
            names.append(f"rank {rank}  {lane.stream} {share}" if number == 0 else f"{lane.stream} {share}")
            y += 1
        y += 0.6
    figure, axes = _new_chart(12, 1.6 + 0.21 * y)
    for lane, position in zip(seen, positions, strict=True):
        if lane.stream == COMPUTE:
            axes.barh(position, seconds / one, height=0.8, color=_LIGHT["panel"])
        _draw_lane(axes, lane, position, one)
    axes.set_yticks(positions, names, fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.margins(y=0.01)
    axes.set(xlim=(0, seconds / one), xlabel=f"time [{unit}]")
    _set_title(axes, plot_data, "Timeline of a step: streams, and the share of the step that each is busy")
    signs = {phase: f"phase-{phase}" for phase in PHASES}
    _add_legend(figure, signs | {f"communication {LINK_NAMES[link]}": f"link-{link}" for link in LINKS})
    return figure


def _draw_lane(axes: Any, lane: Lane, position: float, one: float) -> None:
    """Draw the bars of a stream; opacity is the busy fraction of a bar."""
    ranges = [(bar.start / one, (bar.end - bar.start) / one) for bar in lane.bars]
    names = [f"link-{lane.link}" if lane.link else f"phase-{bar.phase}" for bar in lane.bars]
    shares = [bar.busy / (bar.end - bar.start or 1) for bar in lane.bars]
    colours = [(_LIGHT[name], min(1.0, share)) for name, share in zip(names, shares, strict=True)]
    # Edges keep bars visible that are narrower than a pixel.
    axes.broken_barh(ranges, (position - 0.4, 0.8), facecolors=colours, edgecolors=colours, linewidth=0.5)

"""Pictures of a plan as PNG files: the same as on its page, as far as they are still."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from ...base.errors import ConfigError
from ..time import COMPUTE
from .colours import FIT, GROUND, LINK, OWNER, PHASE
from .drawings import drawn_layouts
from .mesh_map import HEAD, boxes
from .sections import busiest
from .series import LINKS, PHASES, Lane
from .shown import LINK_NAMES, Shown, frontier, traffic
from .units import size_text, time_text

PICTURES = ("memory", "timeline", "mesh", "traffic", "layouts")
LIGHT = 0
"""The place of colours for light ground."""
GIB = 2**30
TINY = 1e-3
"""Streams that work a smaller part of the step are left out."""


def write_pngs(directory: Path, subject: Shown, which: Collection[str] = PICTURES) -> list[Path]:
    """Write each picture that there is into a file of its own; returns the files.

    Args:
        which: of `PICTURES`.

    Raises:
        ConfigError: one cannot be written.
    """
    draw = {"memory": _memory, "timeline": _timeline, "mesh": _mesh, "traffic": _traffic, "layouts": _layouts}
    missing = {name for name, there in (("traffic", traffic(subject)), ("layouts", subject.layouts)) if not there}
    paths = []
    for name in (each for each in PICTURES if each in which and each not in missing):
        figure, path = draw[name](subject), directory / f"{name}.png"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, dpi=120)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror or error}.") from error
        paths.append(path)
    return paths


def _figure(width: float, height: float) -> tuple[Any, Any]:
    # The object interface draws without a display and without global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    return figure, axes


def _colour(pair: tuple[str, str]) -> str:
    return pair[LIGHT]


def _titled(axes: Any, subject: Shown, what: str, pad: float = 6) -> None:
    of = f" ({subject.depth})" if subject.depth else ""
    axes.set_title(f"{what}{of}\n{subject.title}, {subject.device.name}; planned", loc="left", fontsize=10, pad=pad)


def _signs(figure: Any, signs: dict[str, str], columns: int = 8) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=name) for name, colour in signs.items()]
    count = min(columns, len(handles))
    figure.legend(handles=handles, loc="outside lower center", ncols=count, fontsize=8.5, frameon=False)


def _scale(seconds: float) -> tuple[float, str]:
    return (1.0, "s") if seconds >= 2 else (1e-3, "ms")


def _memory(subject: Shown) -> Any:
    """Of the rank that reserves the most."""
    place = max(range(len(subject.memories)), key=subject.reserved.__getitem__)
    found, line, taken = subject.memories[place], subject.lines[place], subject.reserved[place]
    one, unit = _scale(line.seconds)
    figure, axes = _figure(10.5, 5)
    times = [each / one for each in (*found.seconds, line.seconds)]
    series = [[size / GIB for size in (*sizes, sizes[-1])] for sizes in found.owners.values()]
    colours = [_colour(OWNER[owner]) for owner in found.owners]
    axes.stackplot(times, series, colors=colours, step="post", linewidth=0)
    peak, at = found.totals[found.peak], found.seconds[found.peak] / one
    dark, limit = _colour(GROUND["text"]), subject.limit
    axes.axhline(taken / GIB, color=dark, linestyle="--", linewidth=1.2)
    most = max(taken, peak)
    # Names of lines that are close are above the upper and below the lower one.
    is_close = 0 <= limit - taken < 0.1 * limit
    below = (-4, -11 if is_close else 3)
    axes.annotate(f"reserved {size_text(taken)}", (1, taken / GIB), below, bbox=_HALO, **_at_edge(dark))
    if limit <= 2.2 * most:
        red, most = _colour(GROUND["limit"]), max(most, limit)
        axes.axhline(limit / GIB, color=red, linestyle="--", linewidth=1.6)
        above = (-4, 3 if is_close else -12)
        axes.annotate(f"usable {size_text(limit)}", (1, limit / GIB), above, **_at_edge(red))
    axes.plot([at], [peak / GIB], "o", color="white", markeredgecolor=dark, markersize=6, clip_on=False)
    words = f"peak {size_text(peak)}: {found.operators[found.peak]}"
    shift, side = (8, "left") if at < times[-1] / 2 else (-8, "right")
    # Not on the line of what is reserved.
    where = (at, (taken if taken - peak < 0.08 * most else peak) / GIB)
    axes.annotate(words, where, (shift, 5), textcoords="offset points", ha=side, fontsize=8.5, bbox=_HALO)
    axes.set(xlim=(0, times[-1]), ylim=(0, most / GIB * 1.1), xlabel=f"time [{unit}]", ylabel="memory held [GiB]")
    axes.grid(axis="y", color=_colour(GROUND["line"]))
    far = "" if limit <= 2.2 * taken else f"; usable {size_text(limit)}, far above"
    _titled(axes, subject, f"Memory over the step, rank {found.rank}{far}", pad=24)
    _strip(axes, next(lane for lane in subject.lanes if lane.rank == found.rank and lane.stream == COMPUTE), one)
    _signs(figure, {owner: _colour(OWNER[owner]) for owner in found.owners})
    return figure


def _strip(axes: Any, lane: Lane, one: float) -> None:
    """What is computed when, above the axes; phases are named where there is room."""
    low, high = axes.get_xlim()
    across = axes.get_xaxis_transform()
    colours = [_colour(PHASE[bar.phase]) for bar in lane.bars]
    ranges = [(bar.start / one, (bar.end - bar.start) / one) for bar in lane.bars]
    axes.broken_barh(ranges, (1.01, 0.04), facecolors=colours, transform=across, clip_on=False, linewidth=0)
    for phase, bars in groupby(lane.bars, key=lambda bar: bar.phase):
        run = list(bars)
        start, end = run[0].start / one, run[-1].end / one
        if end - start > 0.1 * (high - low):
            middle = (start + end) / 2
            axes.text(middle, 1.03, phase, transform=across, ha="center", va="center", fontsize=7.5, color="white")


def _at_edge(colour: str) -> dict[str, Any]:
    """How lines are named at their right ends."""
    return {
        "xycoords": ("axes fraction", "data"),
        "textcoords": "offset points",
        "ha": "right",
        "color": colour,
        "fontsize": 8.5,
    }


def _timeline(subject: Shown) -> Any:
    seconds = max(line.seconds for line in subject.lines)
    one, unit = _scale(seconds)
    busy = {id(lane): sum(bar.busy for bar in lane.bars) for lane in subject.lanes}
    seen = [lane for lane in subject.lanes if lane.stream == COMPUTE or busy[id(lane)] > TINY * seconds]
    places, names, y = [], [], 0.0
    for rank, own in groupby(seen, key=lambda lane: lane.rank):
        for number, lane in enumerate(own):
            places.append(y)
            share = f"{busy[id(lane)] / seconds:.1%}"
            names.append(f"rank {rank}  {lane.stream} {share}" if number == 0 else f"{lane.stream} {share}")
            y += 1
        y += 0.6
    figure, axes = _figure(12, 1.6 + 0.21 * y)
    for lane, place in zip(seen, places, strict=True):
        if lane.stream == COMPUTE:
            axes.barh(place, seconds / one, height=0.8, color=_colour(GROUND["panel"]))
        _draw_lane(axes, lane, place, one)
    axes.set_yticks(places, names, fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.margins(y=0.01)
    axes.set(xlim=(0, seconds / one), xlabel=f"time [{unit}]")
    _titled(axes, subject, "Timeline of a step: streams, and the part of the step that each works")
    signs = {phase: _colour(PHASE[phase]) for phase in PHASES}
    signs |= {f"communication {LINK_NAMES[link]}": _colour(LINK[link]) for link in LINKS}
    _signs(figure, signs)
    return figure


def _draw_lane(axes: Any, lane: Lane, place: float, one: float) -> None:
    """What is not worked in a bar makes it paler."""
    from matplotlib.colors import to_rgba

    ranges = [(bar.start / one, (bar.end - bar.start) / one) for bar in lane.bars]
    colours = [
        to_rgba(_colour(LINK[lane.link] if lane.link else PHASE[bar.phase]), bar.busy / (bar.end - bar.start or 1))
        for bar in lane.bars
    ]
    # Edges show what is narrower than a pixel.
    axes.broken_barh(ranges, (place - 0.4, 0.8), facecolors=colours, edgecolors=colours, linewidth=0.5)


def _mesh(subject: Shown) -> Any:
    from matplotlib.patches import FancyBboxPatch

    found = boxes(subject.degrees, subject.device)
    around = found[0]
    figure, axes = _figure(max(7.0, around.width / 96 + 0.4), around.height / 96 + 0.9)
    quiet, dark = _colour(GROUND["quiet"]), _colour(GROUND["text"])
    for box in found:
        edge = _colour(LINK[box.link]) if box.link else quiet
        fill = {"node": _colour(GROUND["panel"]), "level": edge + "18", "more": "none"}.get(box.kind, "white")
        style = "round,pad=0,rounding_size=4"
        dashes = ":" if box.kind == "more" else "-"
        patch = FancyBboxPatch(
            (box.x, box.y), box.width, box.height, boxstyle=style, fc=fill, ec=edge, linestyle=dashes, linewidth=1.2
        )
        axes.add_patch(patch)
        if box.kind in ("level", "node"):
            colour = edge if box.link else dark
            axes.text(box.x + 7, box.y + HEAD - 6, box.text, fontsize=8, weight="bold", color=colour)
        else:
            middle = (box.x + box.width / 2, box.y + box.height / 2)
            axes.text(*middle, box.text, fontsize=7.5, ha="center", va="center", color=dark)
    axes.set(xlim=(-4, around.width + 4), ylim=(around.height + 4, -4), aspect="equal")
    axes.set_anchor("W")
    axes.set_axis_off()
    node = subject.device.node.ranks
    axes.set_title(f"Mesh: {subject.degrees}, on nodes of {node} ranks", loc="left", fontsize=10)
    _signs(figure, {LINK_NAMES[link]: _colour(LINK[link]) for link in LINKS})
    return figure


def _traffic(subject: Shown) -> Any:
    rows = busiest(traffic(subject))
    figure, axes = _figure(10.5, 1.5 + 0.55 * len(rows))
    most = max(max(each.inside, each.between) for each in rows)
    for place, each in enumerate(rows):
        for offset, link, size in ((-0.2, "inside", each.inside), (0.2, "between", each.between)):
            if size:
                axes.barh(place + offset, size / GIB, height=0.36, color=_colour(LINK[link]))
                at = (size / GIB, place + offset)
                axes.annotate(size_text(size), at, (4, 0), textcoords="offset points", va="center", fontsize=8)
        took = f"{time_text(each.seconds)}, {each.hidden:.0%} hidden"
        axes.annotate(took, (1, place), xycoords=("axes fraction", "data"), ha="right", va="center", fontsize=8.5)
    axes.set_yticks(range(len(rows)), [f"{each.stream}\n{each.ranks:,} ranks" for each in rows], fontsize=8.5)
    axes.set(xlim=(0, most / GIB * 1.45), ylim=(len(rows) - 0.5, -0.5), xlabel="sent by one device in a step [GiB]")
    axes.grid(axis="x", color=_colour(GROUND["line"]))
    axes.set_title(
        f"Bytes over each link, rank {rows[0].rank}\n{subject.title}, {subject.device.name}; planned",
        loc="left",
        fontsize=10,
    )
    _signs(figure, {LINK_NAMES[link]: _colour(LINK[link]) for link in LINKS})
    return figure


def _layouts(subject: Shown) -> Any:
    found, best, limit = drawn_layouts(subject.layouts), frontier(subject.layouts), subject.limit
    figure, axes = _figure(9.5, 5.2)
    edge = 1.7 * limit / GIB
    for fits, name, marker in ((True, "fits", "o"), (False, "too large", "x")):
        of = [each for each in found if each["fits"] is fits]
        style: dict[str, Any] = {"edgecolors": _colour(FIT[name]), "facecolors": "none"}
        style = style if fits else {"color": _colour(FIT[name])}
        axes.scatter(*_points(of, edge), marker=marker, s=26, linewidths=1.1, label=f"{name} ({len(of):,})", **style)
    axes.plot(*_points(best, edge), "o:", color=_colour(FIT["fits"]), markersize=6, label="not beaten in both")
    axes.axhline(limit / GIB, color=_colour(GROUND["limit"]), linestyle="--", linewidth=1.5)
    axes.annotate(f"usable {size_text(limit)}", (1, limit / GIB), (-4, 4), **_at_edge(_colour(GROUND["limit"])))
    for each in best[:1]:
        at = (each["step_seconds"], each["peak_reserved_bytes"] / GIB)
        axes.annotate(each["label"], at, (8, -3), textcoords="offset points", fontsize=8, bbox=_HALO)
    seconds: Sequence[float] = [each["step_seconds"] for each in found]
    if max(seconds) > 8 * min(seconds):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
    axes.set(ylim=(0, None), xlabel="seconds of a step", ylabel="memory reserved at the peak [GiB]")
    axes.grid(color=_colour(GROUND["line"]))
    axes.set_title(f"{len(subject.layouts):,} layouts, {subject.device.name}; planned", loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=8.5, loc="upper right")
    return figure


_HALO = {"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 1}


def _points(layouts: Sequence[Any], edge: float) -> tuple[list[float], list[float]]:
    """Seconds and GiB, of what is far too large at the edge."""
    seconds = [each["step_seconds"] for each in layouts]
    return seconds, [min(edge, each["peak_reserved_bytes"] / GIB) for each in layouts]

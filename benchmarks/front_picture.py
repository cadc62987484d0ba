"""The picture at the top of README, on light and on dark ground; `front.py` gives the numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from meshwright_plan.plots.marks import BASE_COLOURS, OWNER_COLOURS

INCHES = (10.0, 4.7)
DPI = 200
CURVES = (
    ("#c9ced6", "#4a5260"),
    ("#1d5fd0", "#8ab4ff"),
    ("#2f8fc9", "#8fd0f5"),
    ("#1a7f4b", "#5fd39a"),
    ("#c9691a", "#f0a05a"),
    ("#b8324a", "#f07a8c"),
    ("#7b4ea3", "#b892e6"),
    ("#8a7610", "#d9c050"),
    ("#1f7a74", "#4fb8ae"),
)
"""Of each layout in its order, on light and on dark ground."""
STATE = ("parameters", "gradients", "optimizer")


def draw(content: dict[str, Any], directory: Path) -> None:
    """Write front.png and front-dark.png.

    Args:
        content: of results/front.json.
        directory: of the pictures.
    """
    for is_dark, name in enumerate(("front.png", "front-dark.png")):
        with matplotlib.rc_context({"font.family": "DejaVu Sans", "font.size": 10, "svg.hashsalt": "front"}):
            figure = _figure(content, is_dark)
            figure.savefig(directory / name, dpi=DPI, metadata={"Software": None})


def _figure(content: dict[str, Any], is_dark: int) -> Figure:
    ground = {name: pair[is_dark] for name, pair in BASE_COLOURS.items()}
    figure = Figure(figsize=INCHES, facecolor=ground["ground"])
    curves = figure.add_axes((0.048, 0.14, 0.392, 0.69))
    memory = figure.add_axes((0.668, 0.14, 0.148, 0.69))
    traffic = figure.add_axes((0.845, 0.14, 0.148, 0.69))
    for axes in (curves, memory, traffic):
        _plain(axes, ground)
    _curves(curves, content["layouts"], ground, is_dark)
    _bars(memory, traffic, content["layouts"], ground, is_dark)
    return figure


def _curves(axes: Axes, layouts: dict[str, Any], ground: dict[str, str], is_dark: int) -> None:
    """The losses over each other: every later one has longer gaps, through which those beneath are seen."""
    names = list(layouts)
    for place, name in enumerate(names):
        losses = layouts[name]["losses"]
        width, dash = (7.0, (0, ())) if place == 0 else (2.4, (4.0 * (place - 1), (4.0, 4.0 * (len(names) - 2))))
        colour = CURVES[place][is_dark]
        axes.plot(range(1, len(losses) + 1), losses, lw=width, ls=dash, color=colour, zorder=2 + place / 10)
    steps = len(layouts[names[0]]["losses"])
    axes.set_xlim(0, steps + 1)
    axes.set_xlabel("step", color=ground["quiet"])
    _title(axes, "Loss [nats per token]", "one process in gray; eight layouts on top", ground)
    inset = axes.inset_axes((0.47, 0.50, 0.50, 0.42))
    _plain(inset, ground)
    inset.set_facecolor(ground["ground"])
    first = np.array(layouts[names[0]]["losses"])
    smallest = np.spacing(first.min())
    for place, name in enumerate(names[1:], start=1):
        apart = np.maximum(np.abs(np.array(layouts[name]["losses"]) - first), smallest / 2)
        inset.plot(range(1, steps + 1), apart, lw=1.1, color=CURVES[place][is_dark])
    inset.set_yscale("log")
    inset.set_ylim(1e-16, 1e-5)
    inset.set_yticks([1e-15, 1e-11, 1e-7])
    inset.set_xticks([])
    inset.set_title("difference from one process", loc="left", fontsize=8.5, color=ground["quiet"], pad=5)
    inset.minorticks_off()


def _bars(memory: Axes, traffic: Axes, layouts: dict[str, Any], ground: dict[str, str], is_dark: int) -> None:
    names = list(layouts)
    state, rest = OWNER_COLOURS["optimizer"][is_dark], OWNER_COLOURS["activations"][is_dark]
    for row, name in enumerate(names):
        found = layouts[name]["held_bytes"]
        held = sum(found[each] for each in STATE) / 1e6
        peak = found["total"] / 1e6
        sent = layouts[name]["sent_bytes"] / 1e6
        memory.barh(row, held, color=state, height=0.62)
        memory.barh(row, peak - held, left=held, color=rest, height=0.62)
        traffic.barh(row, sent, color=OWNER_COLOURS["gathered"][is_dark], height=0.62)
        memory.text(peak, row, f" {peak:.1f}", va="center", fontsize=9, color=ground["text"])
        traffic.text(sent, row, f" {sent:.1f}" if sent else " nothing", va="center", fontsize=9, color=ground["text"])
    memory.set_yticks(range(len(names)), names, color=ground["text"], fontsize=10)
    traffic.set_yticks([])
    most = {
        memory: max(each["held_bytes"]["total"] for each in layouts.values()),
        traffic: max(each["sent_bytes"] for each in layouts.values()),
    }
    for axes, largest in most.items():
        axes.set_ylim(len(names) - 0.45, -0.55)
        axes.set_xlim(0, largest / 1e6 * 1.24)
        axes.set_xticks([])
        axes.spines["bottom"].set_visible(False)
        axes.grid(visible=False)
    for row, _ in enumerate(names):
        memory.add_patch(
            Rectangle(
                (-0.045, (len(names) - row - 0.72) / len(names)),
                0.025,
                0.44 / len(names),
                transform=memory.transAxes,
                color=CURVES[row][is_dark],
                clip_on=False,
                lw=0,
            )
        )
    memory.tick_params(axis="y", pad=13)
    _title(memory, "Memory [MB]", "peak of a rank", ground)
    _title(traffic, "Sent [MB]", "per rank and step", ground)
    memory.text(0, -0.075, "■ weights, gradients, optimizer", transform=memory.transAxes, fontsize=8, color=state)
    memory.text(
        0.0, -0.13, "■ activations, gathered parameters, buffers", transform=memory.transAxes, fontsize=8, color=rest
    )


def _title(axes: Axes, title: str, below: str, ground: dict[str, str]) -> None:
    axes.text(0, 1.115, title, transform=axes.transAxes, fontsize=11, weight="bold", color=ground["text"])
    axes.text(0, 1.05, below, transform=axes.transAxes, fontsize=9, color=ground["quiet"])


def _plain(axes: Axes, ground: dict[str, str]) -> None:
    axes.set_facecolor(ground["ground"])
    axes.tick_params(length=0, colors=ground["quiet"], labelsize=9)
    axes.grid(axis="y", color=ground["line"], lw=0.6)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(ground["line"])

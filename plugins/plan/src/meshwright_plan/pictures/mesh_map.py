"""The map of a mesh: its axes as blocks within blocks, of which a few are drawn.

Ranks fill nodes in their order, so a node is a block too. An axis that reaches beyond a node is drawn in two parts:
within nodes, and between them. Of many equal blocks the first is drawn with its contents.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from meshwright.plugin import ROOT_AXES, VIEWS, Degrees

from ..device import Device
from ..links import members
from .series import BETWEEN, INSIDE, link

NODE, TIMES, DASH = "node", "\N{MULTIPLICATION SIGN}", "\N{EN DASH}"
SHARES = {
    "pp": "other blocks of the model each; activations go from stage to stage, gradients back",
    "dp_replicate": "the same parameters each; gradients are summed",
    "dp_shard": "a part of each parameter each, gathered before use; gradients are reduced to the parts",
    "cp": "a part of each sequence each; keys and values are passed",
    "tp": "a slice of each matrix each; activations are gathered or summed",
    "ep": "other experts each; tokens go to where theirs are",
    "ep_shard": "a part of the same experts each",
    "dp": "different rows of a batch each",
    "dp_cp": "different tokens of a batch each; losses and their counts are summed",
    "dp_shard_cp": "a part of each parameter each, gathered before use; gradients are reduced to the parts",
}
ALL = 32
"""Meshes of this many ranks or fewer are drawn rank by rank."""
HEAD, GAP, PAD, WIDEST = 20, 6, 8, 960
LETTER = 7.2
"""Width of a letter, in pixels."""


@dataclass(frozen=True)
class Level:
    """An axis of the mesh, its part within or between nodes, or the node itself (`NODE`, without a link).

    Attributes:
        count: blocks along it.
        ranks: in each block.
    """

    axis: str
    count: int
    ranks: int
    link: str = ""


@dataclass(frozen=True)
class Group:
    """The ranks along an axis or view of the mesh that one rank belongs to.

    Attributes:
        groups: number of groups along the axis.
        nodes: number of nodes that this group spans.
    """

    name: str
    ranks: tuple[int, ...]
    groups: int
    nodes: int
    link: str
    shares: str


def levels(degrees: Degrees, device: Device, axes: Sequence[str] = ROOT_AXES) -> list[Level]:
    """Return the levels of the mesh from the outermost, without axes of a single rank."""
    node, world = device.node.ranks, degrees.world_size
    found, inner = [], world
    for axis in axes:
        count, outer = getattr(degrees, axis), inner
        inner //= count
        if count == 1:
            continue
        if inner < node < outer and node % inner == 0 == outer % node:
            found += [Level(axis, outer // node, node, BETWEEN), Level(NODE, 1, node)]
            found.append(Level(axis, node // inner, inner, INSIDE))
        else:
            is_inside = world <= node or (outer <= node and node % outer == 0)
            found.append(Level(axis, count, inner, INSIDE if is_inside else BETWEEN))
            found += [Level(NODE, 1, node)] * (inner == node)
    return [Level(NODE, 1, world), *found] if world <= node else found


def groups(degrees: Degrees, device: Device, rank: int) -> list[Group]:
    """Return the groups of a rank along all axes and views in which it is not alone."""
    found = []
    for name in [*ROOT_AXES, *VIEWS, *(["ep_shard", "ep"] if degrees.ep > 1 else [])]:
        ranks = members(name, rank, degrees, size_of(name, degrees))
        axes_above_one = [axis for axis in VIEWS.get(name, (name,)) if getattr(degrees, axis) > 1]
        if len(ranks) > 1 and (name not in VIEWS or len(axes_above_one) > 1):
            nodes = len({each // device.node.ranks for each in ranks})
            count = degrees.world_size // len(ranks)
            found.append(Group(name, tuple(ranks), count, nodes, link(ranks, device), SHARES[name]))
    return found


def size_of(name: str, degrees: Degrees) -> int:
    """Return the number of ranks along an axis or view."""
    return math.prod(getattr(degrees, axis) for axis in VIEWS.get(name, (name,)))


@dataclass(frozen=True)
class Box:
    """A rectangle of the map, in pixels.

    Attributes:
        kind: "level", "node", "rank", "block" (of ranks that are not drawn) or "more" (several such blocks).
        link: of a level.
    """

    x: float
    y: float
    width: float
    height: float
    kind: str
    text: str
    link: str = ""


def boxes(degrees: Degrees, device: Device, axes: Sequence[str] = ROOT_AXES) -> list[Box]:
    """Return the rectangles of the map; the first one encloses all others."""
    return _drawn(levels(degrees, device, axes), 0, degrees, device)


def _drawn(rest: Sequence[Level], first: int, degrees: Degrees, device: Device) -> list[Box]:
    """Draw a block that begins with the rank `first` and has the levels `rest`."""
    if not rest:
        return [Box(0, 0, 8 + LETTER * max(4, len(f"{degrees.world_size - 1}")), 24, "rank", f"{first}")]
    level, inner = rest[0], rest[1:]
    if level.axis == NODE:
        text = f"node {first // device.node.ranks}"
        return _framed([_drawn(inner, first, degrees, device)], "node", text, "")
    part = getattr(degrees, level.axis)
    split = "" if part == level.count else f" of {part:,}"
    children = list(_children(level, inner, first, degrees, device))
    return _framed(children, "level", f"{level.axis} {TIMES} {level.count:,}{split}", level.link)


def _children(
    level: Level, inner: Sequence[Level], first: int, degrees: Degrees, device: Device
) -> Iterator[list[Box]]:
    has_all = degrees.world_size <= ALL
    most = level.count if has_all else (8 if not inner else 3)
    shown = list(range(level.count)) if level.count <= most + 1 else [*range(most - 1), level.count - 1]
    before = -1
    for place in shown:
        begin = first + place * level.ranks
        if place > before + 1:
            yield [_block("more", f"{TIMES} {place - before - 1:,} more")]
        if place == 0 or has_all or not inner:
            yield _drawn(inner, begin, degrees, device)
        else:
            is_node = inner[0].axis == NODE
            name = f"node {begin // device.node.ranks}" if is_node else f"{level.axis} {place}"
            yield [_block("block", f"{name}: {begin}{DASH}{begin + level.ranks - 1}")]
        before = place


def _block(kind: str, text: str) -> Box:
    return Box(0, 0, 2 * PAD + LETTER * len(text), 30, kind, text)


def _framed(children: Sequence[list[Box]], kind: str, text: str, joined: str) -> list[Box]:
    """Put blocks in a row, or below each other if the row is too wide, and a frame with a text around them."""
    widths, heights = [each[0].width for each in children], [each[0].height for each in children]
    is_row = sum(widths) + GAP * (len(widths) - 1) <= WIDEST
    x, y, found = float(PAD), float(HEAD), []
    for own in children:
        if own[0].kind in ("block", "more"):
            own = [replace(own[0], height=max(heights)) if is_row else replace(own[0], width=max(widths))]
        found += [replace(box, x=box.x + x, y=box.y + y) for box in own]
        x, y = (x + own[0].width + GAP, y) if is_row else (x, y + own[0].height + GAP)
    width = max(box.x + box.width for box in found) + PAD
    height = max(box.y + box.height for box in found) + PAD
    return [Box(0, 0, max(width, 2 * PAD + LETTER * len(text)), height, kind, text, joined), *found]

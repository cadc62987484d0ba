"""What a collective costs, by the links that its ranks lie on.

[Note: rings and trees] A ring over n ranks on m nodes takes n - 1 steps to gather or to reduce and scatter, of which
m - 1 go between nodes, and twice as many to do both. Each device passes nearly the whole tensor on inside of its node;
what enters a node is shared by the devices of the group there, each over its own rail. A tree reduces and sends back in
steps that grow with the logarithm of m, at the part `TREE_RATE` of a ring's rate: it is taken for what is small.

Source: the model by which NCCL chooses among its algorithms (NVIDIA/nccl, src/graph/tuning.cc).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..mesh.sizes import EXPERT_AXES, ROOT_AXES, VIEWS, Degrees
from .device import Node

MESSAGES = ("send", "recv", "recv_any_source")
TREE_RATE = 0.5 / 3.8
"""Of a ring's: a tree sends up and down, and its short messages carry flags beside data."""


def members(group: str, rank: int, degrees: Degrees, size: int) -> list[int]:
    """The ranks of a group of a mesh.

    Args:
        group: the name of an axis or view; others stand for neighbouring ranks.
        size: of the group.
    """
    for axes in (ROOT_AXES, EXPERT_AXES):
        wanted = VIEWS.get(group, (group,))
        if not set(wanted) <= set(axes):
            continue
        strides, stride = {}, 1
        for axis in reversed(axes):
            strides[axis] = stride
            stride *= getattr(degrees, axis)
        found = [rank - sum(rank // strides[a] % getattr(degrees, a) * strides[a] for a in wanted)]
        for axis in wanted:
            found = [each + i * strides[axis] for each in found for i in range(getattr(degrees, axis))]
        if len(found) == size:
            return found
    first = rank // size * size
    return list(range(first, first + size))


def seconds(kind: str, size: float, ranks: Sequence[int], node: Node) -> float:
    """Of one collective, once all ranks have come to it.

    Args:
        kind: see `meshwright.testing.collectives`.
        size: bytes, of the whole tensor.
        ranks: two for a message.
    """
    count, nodes = len(ranks), len({rank // node.ranks for rank in ranks})
    if count == 1:
        return 0.0
    here = count / nodes
    size = size * node.factors.get("send" if kind in MESSAGES else kind, 1.0)
    if kind in MESSAGES:
        link = node.inside if nodes == 1 else node.between
        return link.ring_s + size / link.rate
    if kind == "all_to_all":
        away = (count - here) / count * size / node.between.rate if nodes > 1 else 0.0
        near = (here - 1) / count * size / node.inside.rate
        return node.ring_begin_s + (node.between if nodes > 1 else node.inside).ring_s + max(near, away)
    rounds = 2 if kind == "all_reduce" else 1
    near = size * (count - 1) / count / node.inside.rate if here > 1 else 0.0
    away = size * (nodes - 1) / nodes / here / node.between.rate
    steps = (count - nodes) * node.inside.ring_s + (nodes - 1) * node.between.ring_s
    ring = node.ring_begin_s + rounds * (steps + max(near, away))
    if kind not in ("all_reduce", "broadcast"):
        return ring
    rate = (node.inside.rate if nodes == 1 else min(node.inside.rate, here * node.between.rate)) * TREE_RATE
    steps = (here - 1) * node.inside.tree_s + math.log2(nodes) * node.between.tree_s
    return min(ring, node.tree_begin_s + rounds * steps + size / rate)


def passed(kind: str, size: int, ranks: Sequence[int], node: Node) -> tuple[float, float]:
    """Bytes that each device sends in one collective: to others of its node, and to other nodes; of a ring.

    Args:
        kind, size, ranks: as of `seconds`.
    """
    count, nodes = len(ranks), len({rank // node.ranks for rank in ranks})
    if count == 1 or kind.startswith("recv"):
        return 0.0, 0.0
    here = count / nodes
    if kind == "send":
        return (size, 0.0) if nodes == 1 else (0.0, size)
    if kind == "all_to_all":
        return (here - 1) / count * size, (count - here) / count * size
    rounds = 2 if kind == "all_reduce" else 1
    near = size * (count - 1) / count if here > 1 else 0.0
    return rounds * near, rounds * size * (nodes - 1) / nodes / here

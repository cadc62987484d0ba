"""What a collective costs, by the links between its ranks.

[Note: rings and trees] A ring over n ranks on m nodes takes n - 1 steps to gather or to reduce and scatter, of which
m - 1 go between nodes, and twice as many to do both. Each device passes nearly the whole tensor on inside of its node;
what enters a node is shared by the devices of the group there, each over its own rail. A tree reduces and sends back in
steps that grow with the logarithm of m, at `TREE_RATE` times the rate of a ring: small messages take it.

Source: the model by which NCCL chooses among its algorithms (NVIDIA/nccl, src/graph/tuning.cc).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from meshwright.plugin import EXPERT_AXES, ROOT_AXES, VIEWS, Degrees

from .device import Node

MESSAGES = ("send", "recv", "recv_any_source")
TREE_RATE = 0.5 / 3.8
"""Rate of a tree by that of a ring: it sends up and down, and short messages carry flags with their data."""


def members(group: str, rank: int, degrees: Degrees, size: int) -> list[int]:
    """Return the ranks of a group of `size` that `rank` is in.

    Args:
        group: name of an axis or view of the mesh; any other stands for neighbouring ranks.
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
    """Return the time of one collective once all ranks have come to it.

    Args:
        kind: see `meshwright.tracing.collectives`.
        size: bytes of the whole tensor.
        ranks: two for a message.
    """
    count, nodes = len(ranks), len({rank // node.ranks for rank in ranks})
    if count == 1:
        return 0.0
    size = size * node.factors.get("send" if kind in MESSAGES else kind, 1.0)
    outer = node.inside if nodes == 1 else node.between
    if kind in MESSAGES:
        return outer.ring_s + size / outer.rate
    near, away = passed(kind, size, ranks, node)
    carried = max(near / node.inside.rate, away / node.between.rate)
    if kind == "all_to_all":
        return node.ring_begin_s + outer.ring_s + carried
    here, rounds = count / nodes, 2 if kind == "all_reduce" else 1
    ring_steps = (count - nodes) * node.inside.ring_s + (nodes - 1) * node.between.ring_s
    ring = node.ring_begin_s + (rounds * ring_steps + carried)
    if kind not in ("all_reduce", "broadcast"):
        return ring
    rate = (node.inside.rate if nodes == 1 else min(node.inside.rate, here * node.between.rate)) * TREE_RATE
    steps = (here - 1) * node.inside.tree_s + math.log2(nodes) * node.between.tree_s
    return min(ring, node.tree_begin_s + rounds * steps + size / rate)


def passed(kind: str, size: float, ranks: Sequence[int], node: Node) -> tuple[float, float]:
    """Return the bytes that each device sends inside of its node and to other nodes, on a ring; see `seconds`."""
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

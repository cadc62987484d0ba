"""Divide the work of writing checkpoints between ranks, once for all checkpoints of a run.

What a rank has of the state changes with the model and the optimizer, not between saves. So ranks remember how they
divided the work, and a save only asks, by one integer, whether all ranks still have the same. The first save, and one
after a change, gathers an inventory of each rank to the first one, which divides the work and makes the index.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..tensors.ownership import Rectangle, divide
from ..tensors.pieces import Sharded
from ..tensors.state import OptimizerState
from .index import dtype_name, written_index


class Share(NamedTuple):
    """What one rank writes.

    Attributes:
        rectangles: in the order in which they are written.
        grouped: parameters whose optimizer groups it writes.
        valued: parameters whose optimizer values it writes.
        index_json: contents of the index, on the first rank.
    """

    rectangles: tuple[Rectangle, ...]
    grouped: frozenset[str]
    valued: frozenset[str]
    index_json: bytes | None = None


class Held(NamedTuple):
    """What one rank has, in the terms of `Share`; `kinds` are name, shape and dtype of each tensor."""

    rectangles: tuple[Rectangle, ...]
    kinds: tuple[tuple[str, tuple[int, ...], str], ...]
    grouped: tuple[str, ...]
    valued: tuple[str, ...]


class Agreement:
    """The last division of the work.

    Attributes:
        times: how often the work was divided; equal on all ranks.
    """

    def __init__(self) -> None:
        self.times = 0
        self._held: Held | None = None
        self._share: Share | None = None

    def share(
        self, tensors: Mapping[str, Sharded], optimizer: OptimizerState[Sharded] | None, group: dist.ProcessGroup
    ) -> Share:
        """Return what this rank writes. Collective.

        Args:
            tensors: this rank's part of model and optimizer, by the names in the checkpoint.
            optimizer: for its groups and values.
            group: all ranks, with a backend for the CPU.
        """
        held = held_by(tensors, optimizer)
        same = torch.tensor([int(held == self._held)])
        dist.all_reduce(same, op=dist.ReduceOp.MIN, group=group)
        if self._share is None or not same.item():
            self._share, self._held = _divided(held, group), held
            self.times += 1
        return self._share


def held_by(tensors: Mapping[str, Sharded], optimizer: OptimizerState[Any] | None) -> Held:
    """Return this rank's inventory, which holds names and numbers alone."""
    rectangles = (
        Rectangle(name, tuple(piece.offsets), piece.sizes, piece.tensor.element_size())
        for name, sharded in tensors.items()
        for piece in sharded.pieces
    )
    kinds = ((name, tuple(sharded.shape), dtype_name(sharded.dtype)) for name, sharded in tensors.items())
    grouped = (name for each in (optimizer.groups if optimizer is not None else ()) for name in each["params"])
    return Held(tuple(rectangles), tuple(kinds), tuple(grouped), tuple(optimizer.values if optimizer else ()))


def _divided(held: Held, group: dist.ProcessGroup) -> Share:
    """Divide the work on the first rank, and send each rank its share. Collective."""
    is_first = dist.get_rank(group) == 0
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.gather_object(held, found if is_first else None, group=group, group_dst=0)
    shares, index = shares_of(found) if is_first else (None, None)
    box: list[Any] = [None]
    dist.scatter_object_list(box, shares, group=group, group_src=0)
    share: Share = box[0]
    return share._replace(index_json=index)


def shares_of(found: list[Held]) -> tuple[list[Share], bytes]:
    """Return each rank's share, without the index; and the index."""
    owned = divide([held.rectangles for held in found])
    kinds = {name: (shape, dtype) for held in found for name, shape, dtype in held.kinds}
    grouped = _first_holders(held.grouped for held in found)
    valued = _first_holders(held.valued for held in found)
    shares = [Share(tuple(rows), *names) for rows, names in zip(owned, zip(grouped, valued, strict=True), strict=True)]
    return shares, written_index(owned, kinds)


def _first_holders(named: Iterable[Iterable[str]]) -> list[frozenset[str]]:
    """Return, for each rank, the names that no rank before it has."""
    seen: set[str] = set()
    first = []
    for names in named:
        first.append(frozenset(names) - seen)
        seen |= first[-1]
    return first

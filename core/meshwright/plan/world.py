"""A rank of a world of any size that is nowhere but in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist

from .._compat.planning import start_fake_group
from ..base.errors import MeshError, MeshwrightError
from ..mesh.world import World
from ..testing._compat import forget_meshes
from .fakes import Planning

T = TypeVar("T")


class PlannedWorld(World):
    """Every rank has what this one has, and nothing is sent; see `planned_world`."""

    is_planned = True

    def _exchanged(self, sums: Sequence[int], highs: Sequence[int]) -> tuple[list[int], list[int]]:
        return [value * self.size for value in sums], list(highs)

    def raise_any(self, error: MeshwrightError | None) -> NoReturn:
        raise error or MeshError("another rank has found an error.")

    def from_first(self, work: Callable[[], T]) -> T:
        return work()


@contextmanager
def planned_world(rank: int, size: int, *, imbalance: float = 1.0) -> Iterator[PlannedWorld]:
    """One rank of a world, on tensors that have no memory; see `fakes`.

    Args:
        imbalance: how much more often than on average routers choose the first experts.

    Raises:
        MeshError: this process is in a process group already, or there is no such rank.
    """
    if dist.is_initialized():
        raise MeshError("a plan needs a process that is in no process group. Plan before any is started.")
    if not 0 <= rank < size:
        raise MeshError(f"there is no rank {rank} in a world of {size}.")
    start_fake_group(rank, size)
    try:
        with Planning(imbalance):
            yield PlannedWorld(torch.device("cpu"), owns_group=True)
    finally:
        dist.destroy_process_group()
        forget_meshes()

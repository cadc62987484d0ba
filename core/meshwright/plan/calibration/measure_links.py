"""How long collectives take between real ranks, by kind, size and where the ranks lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from ...mesh.world import World, same_timeout
from ...tensors.ops import all_gather_single, reduce_scatter_single
from .fit import Sample
from .measure_compute import Clock, Effort

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send")


def samples(world: World, clock: Clock, effort: Effort, ranks_of_node: int) -> list[Sample]:
    """Collectives of all ranks, of the ranks of each node, of one rank of each node, and of pairs. Collective.

    Groups that do not share a rank are measured at the same time, as a step has them.

    Args:
        ranks_of_node: ranks fill nodes in their order, all alike.
    """
    sizes = {world.size, ranks_of_node, 2} if world.size % 2 == 0 else {world.size, ranks_of_node}
    meshes = [(size, False) for size in sorted(sizes) if size > 1 and world.size % size == 0]
    if 1 < ranks_of_node < world.size:
        meshes.append((world.size // ranks_of_node, True))
    found: list[Sample] = []
    for size, is_across in meshes:
        group, members = _group(world, size, is_across=is_across)
        for kind in KINDS:
            found += _of_kind(kind, group, members, world, clock, effort)
    return found


def _group(world: World, size: int, *, is_across: bool) -> tuple[dist.ProcessGroup, tuple[int, ...]]:
    """This rank's group of so many, and who is in it: neighbours, or those with the same place in each node."""
    others = world.size // size
    with same_timeout():
        mesh = init_device_mesh(world.device.type, (size, others) if is_across else (others, size))
    group = mesh.get_group(0 if is_across else 1)
    return group, tuple(dist.get_process_group_ranks(group))


def _of_kind(
    kind: str, group: dist.ProcessGroup, members: tuple[int, ...], world: World, clock: Clock, effort: Effort
) -> Iterator[Sample]:
    """Of all sizes, as far as they are done within a while."""
    place = dist.get_rank(group)
    # Messages go from the first of a group to the second; on pairs alone, so that a larger group adds nothing.
    if kind == "send" and len(members) > 2:
        return
    for size in effort.messages:
        count = -(-size // (4 * len(members))) * len(members)
        whole, other = torch.zeros(count, device=world.device), torch.zeros(count, device=world.device)
        part = torch.zeros(count // len(members), device=world.device)
        work = _work(kind, group, place, whole, other, part)
        seconds = clock.seconds(work)
        if seconds is None:
            return
        yield Sample(kind, 4 * count, members, seconds)


def _work(
    kind: str, group: dist.ProcessGroup, place: int, whole: Tensor, other: Tensor, part: Tensor
) -> Callable[[], object]:
    if kind == "all_gather":
        return lambda: all_gather_single(whole, part, group=group)
    if kind == "reduce_scatter":
        return lambda: reduce_scatter_single(part, whole, group=group)
    if kind == "all_reduce":
        return lambda: dist.all_reduce(whole, group=group)
    if kind == "all_to_all":
        return lambda: dist.all_to_all_single(other, whole, group=group)
    if kind == "broadcast":
        return lambda: dist.broadcast(whole, group=group, group_src=0)
    if place == 0:
        return lambda: dist.send(whole, group=group, group_dst=1)
    return lambda: dist.recv(whole, group=group, group_src=0)

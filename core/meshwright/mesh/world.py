"""The process group, this rank's device, and what ranks agree on.

[Note: one timeout] All groups of a run wait as long for peers as the group of all ranks, whoever makes them: see
`same_timeout` and `new_group`.

[Note: control plane] Small agreements between ranks (are the counts equal? has any rank found an error?) travel as
CPU tensors where the process group has a backend for them, so that they never wait for queued GPU work.

[Note: doubling] Gloo sends an all-reduce around a ring, in as many steps as there are ranks. A message of the control
plane is small, so it is the steps that count: ranks exchange what they have with a partner 1, 2, 4, ... further on, and
all have everything after log2(ranks) steps. Where the number of ranks is no power of two, those beyond one give what
they have to a partner first, and get the result from it. Source: Thakur et al. 2005, "Optimization of collective
communication operations in MPICH", section 4.4 (recursive doubling). Source: torch.distributed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist

from .._compat.torch import group_timeout, groups_with_timeout
from ..base.errors import MeshError, MeshwrightError
from ..launch.allocator import prefer_expandable_segments
from ..launch.background import in_background
from ..launch.drivers import missing_driver
from ..launch.environment import started_by_launcher
from ..launch.gloo_threads import settle_at_exit
from ..launch.join import join, local_rank
from ..launch.progress import Progress
from ..launch.rank import CONNECT_TIMEOUT_S, connect_store
from ..launch.slurm import devices_of_step
from ..launch.store import keep_to_loopback, wait_until_connected, world_store

T = TypeVar("T")

CONTROL_TAG = 4711
"""Of the control plane's messages between two ranks, so that no other takes them for its own."""


class World:
    """All ranks of the process group. A context manager: it ends the group on leaving, if it started it.

    Attributes:
        device: of this rank.
        group: None for all ranks; else the world is the ranks of this group, as a pipeline's stage sees it.
        rank, size: within the group.
        owns_group: whether leaving the context ends the process group.
        progress: where this rank is in its run, for a watchdog.
        is_planned: whether nothing is computed or sent here, and all other ranks are taken to have what this one has.
    """

    is_planned = False

    def __init__(self, device: torch.device, *, owns_group: bool, group: dist.ProcessGroup | None = None) -> None:
        self.device, self.group, self.owns_group = device, group, owns_group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.progress = Progress()
        self._begun: Callable[[], object] | None = None
        config = dist.distributed_c10d.get_backend_config()
        self._control_device = torch.device("cpu") if "cpu" in config or "gloo" in config else device
        self._doubles = self._control_device.type == "cpu" and ("cpu:gloo" in config or config == "gloo")

    def reduce_ints(self, values: Sequence[int], op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> list[int]:
        """All-reduce a few integers over all ranks by SUM, MAX or MIN; see [Note: control plane]."""
        if op == dist.ReduceOp.SUM:
            return self.exchange(values, ())[0]
        if op == dist.ReduceOp.MAX:
            return self.exchange((), values)[1]
        return [-value for value in self.exchange((), [-value for value in values])[1]]

    def exchange(self, sums: Sequence[int], highs: Sequence[int]) -> tuple[list[int], list[int]]:
        """One message of all ranks: add up some integers, and take the highest of others.

        Args:
            sums: int64; sums are modulo 2**64.
            highs: int64.
        """
        self._finish_begun()
        return self._exchanged(sums, highs)

    def begin_exchange(self, sums: Sequence[int], highs: Sequence[int]) -> Callable[[], tuple[list[int], list[int]]]:
        """`exchange` in a thread of its own, while the caller does other things; collective over all ranks.

        No other message of all ranks overtakes it: who sends one waits for it first.

        Returns:
            What waits for the result, and gives it.
        """
        self._finish_begun()
        if not self._doubles or self.size == 1:
            result = self._exchanged(sums, highs)
            return lambda: result
        waiting = in_background(lambda: self._exchanged(sums, highs))
        self._begun = waiting
        return waiting

    def _exchanged(self, sums: Sequence[int], highs: Sequence[int]) -> tuple[list[int], list[int]]:
        mine = torch.tensor([*sums, *highs], dtype=torch.int64, device=self._control_device)
        if self._doubles:
            self._double(mine, len(sums))
        else:
            # NCCL has trees.
            for part, op in ((mine[: len(sums)], dist.ReduceOp.SUM), (mine[len(sums) :], dist.ReduceOp.MAX)):
                if part.numel():
                    dist.all_reduce(part, op=op, group=self.group)
        values = mine.tolist()
        return values[: len(sums)], values[len(sums) :]

    def _finish_begun(self) -> None:
        """Wait for the message that has begun, if there is one."""
        if self._begun is not None:
            wait, self._begun = self._begun, None
            wait()

    def _double(self, mine: torch.Tensor, sums: int) -> None:
        """Combine `mine` with those of all ranks, in place; see [Note: doubling]."""
        power = 1 << (self.size.bit_length() - 1)
        is_beyond, has_beyond = self.rank >= power, self.rank + power < self.size
        theirs = torch.empty_like(mine)

        def combine() -> None:
            mine[:sums] += theirs[:sums]
            torch.maximum(mine[sums:], theirs[sums:], out=mine[sums:])

        if is_beyond:
            self._pass(self.rank - power, send=mine)
            self._pass(self.rank - power, receive=mine)
            return
        if has_beyond:
            self._pass(self.rank + power, receive=theirs)
            combine()
        step = 1
        while step < power:
            self._pass(self.rank ^ step, send=mine, receive=theirs)
            combine()
            step *= 2
        if has_beyond:
            self._pass(self.rank + power, send=mine)

    def _pass(self, peer: int, *, send: torch.Tensor | None = None, receive: torch.Tensor | None = None) -> None:
        works = [dist.isend(send, group=self.group, group_dst=peer, tag=CONTROL_TAG)] if send is not None else []
        works += [dist.irecv(receive, group=self.group, group_src=peer, tag=CONTROL_TAG)] if receive is not None else []
        for work in works:
            if work is not None:
                work.wait()

    def raise_together(self, error: MeshwrightError | None) -> None:
        """Raise on every rank if any rank brings an error; see [Note: equal on every rank] in `contract`.

        Args:
            error: what this rank found wrong, or None.

        Raises:
            MeshwrightError: the error of the lowest rank that has one, in that error's class; where other ranks
                found other things, the text says so.
        """
        if self.reduce_ints([int(error is not None)])[0]:
            self.raise_any(error)

    def raise_any(self, error: MeshwrightError | None) -> NoReturn:
        """`raise_together` where all ranks know that some rank has an error."""
        self._finish_begun()
        found: list[MeshwrightError | None] = [None] * self.size
        dist.all_gather_object(found, error, group=self.group)
        culprits = {rank: each for rank, each in enumerate(found) if each is not None}
        first, cause = next(iter(culprits.items()))
        if len({str(each) for each in culprits.values()}) == 1 and len(culprits) == self.size:
            raise cause
        ranks = ", ".join(map(str, culprits))
        raise type(cause)(f"{cause}\n(found on rank {first}; ranks with an error: {ranks} of {self.size})")

    def together(self, work: Callable[[], T]) -> T:
        """Run `work`, which must not issue collectives, and raise on every rank if it fails on any.

        Raises:
            MeshwrightError: as `raise_together`.
        """
        error: MeshwrightError | None = None
        result: T | None = None
        try:
            result = work()
        except MeshwrightError as caught:
            error = caught
        self.raise_together(error)
        return result  # type: ignore[return-value]

    def from_first(self, work: Callable[[], T]) -> T:
        """Run `work`, which must not issue collectives, on the first rank alone; its result or error is that of all.

        Raises:
            MeshwrightError: as `work` does.
        """
        box: list[tuple[MeshwrightError | None, T | None]] = [(None, None)]
        if self.rank == 0:
            try:
                box[0] = (None, work())
            except MeshwrightError as caught:
                box[0] = (caught, None)
        self._finish_begun()
        dist.broadcast_object_list(box, group=self.group, group_src=0)
        error, result = box[0]
        if error is not None:
            raise error
        return result  # type: ignore[return-value]

    def __enter__(self) -> World:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        # After an error the peers may never reach this point: ending the group could wait for them.
        if error_type is None:
            self.close()

    def close(self) -> None:
        """End the process group, if this started it; nothing otherwise."""
        if self.owns_group and dist.is_initialized():
            self._finish_begun()
            dist.destroy_process_group()


def same_timeout() -> AbstractContextManager[None]:
    """Around what makes process groups, such as a `DeviceMesh` or a package; see [Note: one timeout]."""
    return groups_with_timeout(group_timeout())


def new_group(backend: str) -> dist.ProcessGroup:
    """Another group of all ranks, over a backend of its own; see [Note: one timeout]. Collective."""
    return dist.new_group(backend=backend, timeout=group_timeout())


def open_world(
    device: str | torch.device | None = None, *, store: dist.Store | None = None, timeout_s: float = 600.0
) -> World:
    """Join the process group that exists, or start one.

    Without a process group, the launcher that has started this process is joined (see docs/launchers.md); where none
    has, this process is a world of one.

    Args:
        device: "cpu", "cuda" or "cuda:1"; None takes the accelerator if there is one. Each rank of a node gets the
            device of its LOCAL_RANK unless an index is given.
        store: a store to start the group with, instead of the one that the environment names.
        timeout_s: how long a collective may wait for peers, in seconds.

    Raises:
        MeshError: there is no such device, the existing group cannot serve it, or launchers contradict each other.
    """
    join(has_store=store is not None)
    settle_at_exit()
    prefer_expandable_segments()
    chosen = find_device(device)
    if chosen.type != "cpu":
        torch.accelerator.set_device_index(chosen.index)
    if dist.is_initialized():
        _check_backend(chosen)
        return World(chosen, owns_group=False)
    # Gloo beside NCCL serves CPU tensors: the control plane, and checkpoints.
    on_device = "gloo" if chosen.type == "cpu" else _device_backend(chosen)
    backend = "gloo" if chosen.type == "cpu" else f"cpu:gloo,{chosen.type}:{on_device}"
    # Bound to its device, NCCL makes the groups of an axis by one split, instead of one group after the other.
    bound = chosen if on_device == "nccl" else None
    timeout = timedelta(seconds=timeout_s)
    keep_to_loopback()
    if started_by_launcher():
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = world_store(store or connect_store(max(timeout_s, CONNECT_TIMEOUT_S)), rank, size)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout, device_id=bound)
        wait_until_connected(store, size)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    return World(chosen, owns_group=True)


def find_device(device: str | torch.device | None) -> torch.device:
    """The device of this rank; see `open_world`.

    Raises:
        MeshError: there is no such device.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    try:
        chosen = torch.device(device) if device is not None else (accelerator or torch.device("cpu"))
    except RuntimeError:
        raise MeshError(f"device {device!r} is no device name. Use 'cpu', 'cuda' or 'cuda:0'.") from None
    if chosen.type == "cpu":
        return torch.device("cpu")
    if accelerator is None or accelerator.type != chosen.type:
        have = accelerator.type if accelerator else "cpu"
        said = f"device {str(device)!r} is not available here. Available: {have}. Set device={have}."
        raise MeshError(f"{said}{missing_driver(' ')}")
    count = torch.accelerator.device_count()
    index = chosen.index if chosen.index is not None else local_rank(count) % count
    if index >= count:
        raise MeshError(f"device index {index} does not exist: this node has {count} {chosen.type} devices.")
    return torch.device(chosen.type, index)


def _device_backend(device: torch.device) -> str:
    # Two ranks on one GPU: NCCL refuses duplicates, gloo takes CUDA tensors.
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if ranks_here > max(torch.accelerator.device_count(), devices_of_step()):
        return "gloo"
    return dist.get_default_backend_for_device(device)


def _check_backend(device: torch.device) -> None:
    config = dist.distributed_c10d.get_backend_config()
    if device.type not in config and "gloo" not in config and device.type == "cpu":
        raise MeshError(
            f"the existing process group ({config}) cannot communicate CPU tensors, but the device is cpu. "
            f"Start it with backend 'gloo' or 'cpu:gloo,cuda:nccl', or use an accelerator."
        )

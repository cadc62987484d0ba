"""The process group of a run, this rank's device, and small control messages between ranks.

[Note: one timeout] All process groups of a run have the timeout of the group of all ranks, including those that torch
creates: see `use_run_timeout` and `new_group`.

[Note: control plane] Small messages between ranks are sent as CPU tensors if the process group has a backend for them,
so that they never wait for queued GPU work.

[Note: doubling] Gloo's all-reduce is a ring with as many steps as ranks. The latency of small messages depends on the
number of steps, so ranks exchange partial results with a partner 1, 2, 4, ... ranks away. If the number of ranks is not
a power of two, the surplus ranks send theirs to a partner first, and get the result from it. Source: Thakur et al.
2005, "Optimization of collective communication operations in MPICH", section 4.4 (recursive doubling).

[Note: gloo's threads] Gloo's threads release the tensors of a collective shortly after it ends. Until then, a rank's
memory differs from run to run, and a process that exits is aborted ("terminate called without an active exception"):
pytorch/pytorch pull request 179291, issue 190489.
"""

from __future__ import annotations

import atexit
import functools
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist

from .._compat.torch import GLOO_THREAD_NAME, get_group_timeout, new_group_timeout, record_if_profiling
from ..base.errors import MeshError, MeshwrightError
from ..events.step import WAIT_FOR_RANKS
from .progress import Progress

_POLL_S, _TIMEOUT_S = 5e-5, 1.0
_TASK_DIR = Path("/proc/self/task")
_GLOO_THREAD_NAME = f"({GLOO_THREAD_NAME}) "


def wait_for_gloo_threads() -> None:
    """Wait until all gloo threads are idle, or for one second. Waiting for another rank counts as idle. Linux only."""
    if not _TASK_DIR.is_dir():
        return
    end = time.monotonic() + _TIMEOUT_S
    # Twice, since this thread may take the GIL, which freeing a tensor needs, before a gloo thread gets it.
    for _ in range(2):
        time.sleep(_POLL_S)
        while any(map(_is_busy_gloo_thread, _TASK_DIR.iterdir())) and time.monotonic() < end:
            time.sleep(_POLL_S)


@functools.cache
def _wait_for_gloo_threads_at_exit() -> None:
    atexit.register(wait_for_gloo_threads)


def _is_busy_gloo_thread(task: Path) -> bool:
    """Return whether a thread is a gloo thread that is not asleep."""
    try:
        status = (task / "stat").read_text(encoding="utf-8")
    except OSError:
        return False  # the thread has ended
    return _GLOO_THREAD_NAME in status and not status.partition(_GLOO_THREAD_NAME)[2].startswith("S")


T = TypeVar("T")

CONTROL_TAG = 4711
"""Tag of point-to-point messages of the control plane."""


class World:
    """All ranks of the process group, or those of `group`. As a context manager, it destroys a group that it owns.

    `progress`: this rank's progress in its run, for a watchdog.
    """

    is_real = True
    """Whether tensors have values and messages arrive. False in a simulated run, where this rank represents all."""

    def __init__(self, device: torch.device, *, owns_group: bool, group: dist.ProcessGroup | None = None) -> None:
        self.device, self.group, self.owns_group = device, group, owns_group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.progress = Progress()
        self._wait_for_pending: Callable[[], object] | None = None
        config = dist.distributed_c10d.get_backend_config()
        self._control_device = torch.device("cpu") if "cpu" in config or "gloo" in config else device
        self._uses_recursive_doubling = self._control_device.type == "cpu" and (
            "cpu:gloo" in config or config == "gloo"
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank {self.rank} of {self.size}, {self.device})"

    @property
    def is_fake(self) -> bool:
        return not self.is_real

    def reduce_ints(self, values: Sequence[int], op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> list[int]:
        """All-reduce a few integers over all ranks by SUM, MAX or MIN; see [Note: control plane]."""
        if op == dist.ReduceOp.SUM:
            return self.reduce_sum_and_max(values, ())[0]
        if op == dist.ReduceOp.MAX:
            return self.reduce_sum_and_max((), values)[1]
        return [-value for value in self.reduce_sum_and_max((), [-value for value in values])[1]]

    def reduce_sum_and_max(self, sums: Sequence[int], maxima: Sequence[int]) -> tuple[list[int], list[int]]:
        """All-reduce some int64 values by SUM, modulo 2**64, and others by MAX, in one message. Collective."""
        self._finish_pending()
        return self._reduce_now(sums, maxima)

    def begin_reduce_sum_and_max(
        self, sums: Sequence[int], maxima: Sequence[int]
    ) -> Callable[[], tuple[list[int], list[int]]]:
        """Start `reduce_sum_and_max` in a thread; return a function that waits for the result. Collective.

        Later control messages wait for it.
        """
        self._finish_pending()
        if not self._uses_recursive_doubling or self.size == 1:
            result = self._reduce_now(sums, maxima)
            return lambda: result
        future: Future[tuple[list[int], list[int]]] = Future()

        def reduce() -> None:
            try:
                future.set_result(self._reduce_now(sums, maxima))
            except BaseException as error:
                future.set_exception(error)

        def wait() -> tuple[list[int], list[int]]:
            with record_if_profiling(WAIT_FOR_RANKS):
                return future.result()

        threading.Thread(target=reduce, daemon=True).start()
        self._wait_for_pending = wait
        return wait

    def _reduce_now(self, sums: Sequence[int], maxima: Sequence[int]) -> tuple[list[int], list[int]]:
        mine = torch.tensor([*sums, *maxima], dtype=torch.int64, device=self._control_device)
        if self._uses_recursive_doubling:
            self._reduce_by_recursive_doubling(mine, len(sums))
        else:
            # NCCL uses trees, so it needs no recursive doubling.
            for part, op in ((mine[: len(sums)], dist.ReduceOp.SUM), (mine[len(sums) :], dist.ReduceOp.MAX)):
                if part.numel():
                    dist.all_reduce(part, op=op, group=self.group)
        values = mine.tolist()
        return values[: len(sums)], values[len(sums) :]

    def _finish_pending(self) -> None:
        if self._wait_for_pending is not None:
            wait, self._wait_for_pending = self._wait_for_pending, None
            wait()

    def _reduce_by_recursive_doubling(self, mine: torch.Tensor, num_sums: int) -> None:
        """All-reduce `mine` in place; see [Note: doubling]."""
        power = 1 << (self.size.bit_length() - 1)
        has_beyond = self.rank + power < self.size
        theirs = torch.empty_like(mine)

        def combine() -> None:
            mine[:num_sums] += theirs[:num_sums]
            torch.maximum(mine[num_sums:], theirs[num_sums:], out=mine[num_sums:])

        if self.rank >= power:
            self._send_receive(self.rank - power, send=mine)
            self._send_receive(self.rank - power, receive=mine)
            return
        if has_beyond:
            self._send_receive(self.rank + power, receive=theirs)
            combine()
        step = 1
        while step < power:
            self._send_receive(self.rank ^ step, send=mine, receive=theirs)
            combine()
            step *= 2
        if has_beyond:
            self._send_receive(self.rank + power, send=mine)

    def _send_receive(
        self, peer: int, *, send: torch.Tensor | None = None, receive: torch.Tensor | None = None
    ) -> None:
        sending = None if send is None else dist.isend(send, group=self.group, group_dst=peer, tag=CONTROL_TAG)
        receiving = None if receive is None else dist.irecv(receive, group=self.group, group_src=peer, tag=CONTROL_TAG)
        for work in filter(None, (sending, receiving)):
            work.wait()

    def select(self, real: T, fake: T) -> T:
        """Return `real` in a real run and `fake` in a simulated one; see `is_real`."""
        return fake if self.is_fake else real

    def raise_on_all_ranks(self, error: MeshwrightError | None) -> None:
        """Raise the error of the lowest rank that has one, on all ranks. Collective.

        See [Note: equal on every rank] in `meshwright.strategy.contract`.
        """
        if self.reduce_ints([int(error is not None)])[0]:
            self.raise_first_error(error)

    def raise_first_error(self, error: MeshwrightError | None) -> NoReturn:
        """Do the same as `raise_on_all_ranks`, if all ranks know that some rank has an error. Collective."""
        self._finish_pending()
        gathered: list[MeshwrightError | None] = [None] * self.size
        dist.all_gather_object(gathered, error, group=self.group)
        errors = {rank: each for rank, each in enumerate(gathered) if each is not None}
        first, cause = next(iter(errors.items()))
        if len({str(each) for each in errors.values()}) == 1 and len(errors) == self.size:
            raise cause
        ranks = ", ".join(map(str, errors))
        raise type(cause)(f"{cause}\n(found on rank {first}; ranks with an error: {ranks} of {self.size})")

    def run_on_all_ranks(self, work: Callable[[], T]) -> T:
        """Run `work`, which must not issue collectives; if it raises a MeshwrightError on any rank, raise on all."""
        error = result = None
        try:
            result = work()
        except MeshwrightError as caught:
            error = caught
        self.raise_on_all_ranks(error)
        return result  # type: ignore[return-value]

    def run_on_first_rank(self, work: Callable[[], T]) -> T:
        """Run `work`, which must not issue collectives, on rank 0. Return its result, or raise its error, on all."""
        box: list[tuple[MeshwrightError | None, T | None]] = [(None, None)]
        if self.rank == 0:
            try:
                box[0] = (None, work())
            except MeshwrightError as caught:
                box[0] = (caught, None)
        self._finish_pending()
        dist.broadcast_object_list(box, group=self.group, group_src=0)
        error, result = box[0]
        if error is not None:
            raise error
        return result  # type: ignore[return-value]

    def __enter__(self) -> World:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        # After an error, peers may never reach this point, and destroying the group could wait for them.
        if error_type is None:
            self.close()

    def close(self) -> None:
        """Destroy the process group if this world owns it."""
        if self.owns_group and dist.is_initialized():
            self._finish_pending()
            dist.destroy_process_group()


def start_world(
    device: torch.device, *, store: dist.Store, rank: int, size: int, timeout_s: float, shares_device: bool = False
) -> World:
    """Start the process group of all ranks. Collective.

    `shares_device`: several ranks use one accelerator, which gloo supports and NCCL does not.
    """
    _activate_device(device)
    backend, bound = "gloo", None
    if device.type != "cpu":
        # Gloo, next to NCCL, communicates CPU tensors: the control plane, and checkpoints.
        on_device = "gloo" if shares_device else dist.get_default_backend_for_device(device)
        backend = f"cpu:gloo,{device.type}:{on_device}"
        # Bound to its device, NCCL creates the groups of an axis by one split, instead of one group at a time.
        bound = device if on_device == "nccl" else None
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout, device_id=bound)
    return World(device, owns_group=True)


def get_existing_world(device: torch.device | str) -> World:
    """Return the world of the existing process group; MeshError if its backend does not support the device.

    A device without an index is the accelerator of LOCAL_RANK, or else torch's current one.
    """
    device = torch.device(device)
    if device.type != "cpu" and device.index is None:
        local_rank = os.environ.get("LOCAL_RANK")
        current = torch.accelerator.current_device_index()
        index = current if local_rank is None else int(local_rank) % torch.accelerator.device_count()
        device = torch.device(device.type, index)
    _activate_device(device)
    config = dist.distributed_c10d.get_backend_config()
    if device.type == "cpu" and "cpu" not in config and "gloo" not in config:
        raise MeshError(
            f"the existing process group ({config}) cannot communicate CPU tensors, but the device is cpu. "
            f"Start it with backend 'gloo' or 'cpu:gloo,cuda:nccl', or use an accelerator."
        )
    return World(device, owns_group=False)


def _activate_device(device: torch.device) -> None:
    _wait_for_gloo_threads_at_exit()
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)


def use_run_timeout() -> AbstractContextManager[None]:
    """Use the run's timeout for process groups that are created in the context; see [Note: one timeout]."""
    return new_group_timeout(get_group_timeout())


def new_group(backend: str) -> dist.ProcessGroup:
    """Create another group of all ranks, with its own backend; see [Note: one timeout]. Collective."""
    return dist.new_group(backend=backend, timeout=get_group_timeout())

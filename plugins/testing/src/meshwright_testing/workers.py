"""Worker ranks that stay alive between tests.

Starting a process that imports torch and transformers takes seconds; a task on a running worker takes half a second.
Each task gets a new process group with a file store, so tests share no state and no port. After a failure the workers
are replaced, since peers of the failed rank may be stuck in a collective.
"""

from __future__ import annotations

import atexit
import functools
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

from meshwright.plugin import RankError, safe_path_enabled, warn

T = TypeVar("T")

GROUP_TIMEOUT_S = 60.0
"""Timeout of collectives in a task."""
_MAX_THREADS = 256
"""Workers with more threads are replaced. torch before 2.13 keeps process groups of finished tasks alive in caches that
cannot be cleared, and each gloo group has polling threads."""
_TASK_FINISHED = "finished"
"""Message to the workers when all of them have finished a task."""
_PRELOADED = [
    *("torch", "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp", "torch.distributed.tensor"),
    *("transformers", "transformers.modeling_utils", "meshwright.manager.data_parallel"),
]
"""Modules that the fork server imports once for all workers."""


class WorkerPool:
    """`size` processes, one per rank. Use `pool(size)` for a shared pool."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._workers: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []

    def run(self, task: Callable[..., T], *args: Any, timeout_s: float = 300.0, device: str = "cpu") -> list[T]:
        """Run `task(*args)` on every rank, inside a process group.

        Args:
            task: function that workers can import by its module and name; it and `args` are pickled.
            timeout_s: timeout of the task.
            device: cpu, with gloo, or cuda; ranks share GPUs if there are fewer GPUs than ranks.

        Returns:
            Results in order of rank.

        Raises:
            RankError: a rank failed, died or timed out. Includes the traceback of the first failed rank.
        """
        try:
            return self._run(task, args, timeout_s, device)
        except (ConnectionResetError, BrokenPipeError):
            # A worker died without reading the message, so its death came after the previous task.
            warn("a worker died after a task had ended; starting new workers.", stacklevel=2)
            return self._run(task, args, timeout_s, device)

    def _run(self, task: Callable[..., T], args: tuple[Any, ...], timeout_s: float, device: str) -> list[T]:
        if any(_count_threads(process) > _MAX_THREADS for process, _ in self._workers):
            self.close(grace_s=5.0)
        if not self._workers:
            self._start()
        # A store that closes late may write its file again while the directory is removed.
        with tempfile.TemporaryDirectory(prefix="meshwright-", ignore_cleanup_errors=True) as directory:
            message = pickle.dumps((str(Path(directory) / "store"), device, task, args))
            try:
                for _, connection in self._workers:
                    connection.send((sys.path, message))
                results = self._collect(timeout_s)
            except BaseException:
                self.close()
                raise
            for _, connection in self._workers:
                connection.send(_TASK_FINISHED)
        return results

    def close(self, *, grace_s: float = 0.0) -> None:
        """End the workers; the next task starts new ones.

        `grace_s` [s] is their time to clean up. Without it, objects that torch's compiler shares between processes are
        reported as leaked.
        """
        for _, connection in self._workers:
            connection.close()
        deadline = time.monotonic() + grace_s
        for process, _ in self._workers:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()
        self._workers = []

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_run_worker, args=(rank, self.size, theirs), daemon=True)
            with safe_path_enabled():
                process.start()
            theirs.close()
            self._workers.append((process, ours))

    def _collect(self, timeout_s: float) -> list[Any]:
        waiting = {connection: rank for rank, (_, connection) in enumerate(self._workers)}
        results: list[Any] = [None] * self.size
        deadline = time.monotonic() + timeout_s
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                stuck = ", ".join(map(str, waiting.values()))
                raise RankError(f"the task took more than {timeout_s:.0f} s on rank {stuck} of {self.size}.")
            for connection in ready:
                rank = waiting.pop(connection)  # type: ignore[call-overload]
                results[rank] = self._receive(rank, connection)  # type: ignore[arg-type]
        return results

    def _receive(self, rank: int, connection: Connection) -> Any:
        try:
            succeeded, value = pickle.loads(connection.recv_bytes())
        except EOFError:
            process = self._workers[rank][0]
            process.join(5)
            code = process.exitcode
            how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
            raise RankError(f"rank {rank} of {self.size} died with {how}.") from None
        if not succeeded:
            # The first report is the cause, since peers of a failed rank hang until they are ended.
            raise RankError(f"rank {rank} of {self.size} failed:\n{value}")
        return value


@functools.cache
def pool(size: int) -> WorkerPool:
    """Return the shared pool of this process for a world size."""
    workers = WorkerPool(size)
    atexit.register(workers.close, grace_s=5.0)
    return workers


def _count_threads(process: multiprocessing.process.BaseProcess) -> int:
    """Return the number of threads of a worker; 0 if the system is not Linux."""
    tasks = Path(f"/proc/{process.pid}/task")
    return sum(1 for _ in tasks.iterdir()) if tasks.is_dir() else 0


def _run_worker(rank: int, size: int, connection: Connection) -> None:
    """Run tasks in a worker until the pool closes the connection."""
    import torch
    import torch.distributed as dist

    from meshwright.plugin import clear_mesh_caches, freeze_gc, open_world

    torch.set_num_threads(1)
    # Imported modules are never garbage. Collections would take a fifth of a task to search them.
    freeze_gc()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    while True:
        try:
            path, message = connection.recv()
        except (EOFError, OSError):
            return
        sys.path[:] = path
        try:
            store, device, task, args = pickle.loads(message)
            with open_world(device, store=dist.FileStore(store, size), timeout_s=GROUP_TIMEOUT_S):
                connection.send_bytes(pickle.dumps((True, task(*args))))
                # A rank that closes its groups while a peer still connects to them makes the peer fail.
                connection.recv()
        except (EOFError, BrokenPipeError):
            return
        except Exception:
            connection.send_bytes(pickle.dumps((False, traceback.format_exc())))
        # Models and their hooks form cycles that hold process groups, which have polling threads. After some tasks,
        # such as pipelines over fsdp2, the first collection leaves groups that only a later one frees.
        clear_mesh_caches()
        for _ in range(3):
            gc.collect()

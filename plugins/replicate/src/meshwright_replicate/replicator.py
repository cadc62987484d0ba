"""Copy a run's state into the memory of its nodes during training.

[Note: copies] `StateReplicator.replicate` returns when this rank's part is in host memory. A thread with its own
process group passes it to the replica server of its node, and sends it to that of the next node. When all ranks have
done so, rank 0 builds the manifest, and each rank makes its server commit the step. A copy that is due before that is
skipped.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from meshwright.plugin import (
    CheckpointContent,
    ConfigError,
    LoopExtension,
    SavePlanner,
    SigningKey,
    StepResult,
    Stopped,
    StorageOptions,
    StoredFile,
    StrategyManager,
    World,
    collect_content,
    new_group,
    profiler_phase,
    serialize_manifest,
    tensors_file_name,
    warn,
)

from .client import ReplicaClient, ReplicaReader, find_replicas, open_replica_client
from .protocol import Connection


class SharedBuffer:
    """Anonymous shared memory for a rank's part of one step."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.fd = os.memfd_create("meshwright-replica", os.MFD_CLOEXEC)  # another process maps the memory with it
        os.ftruncate(self.fd, size)
        self._mapping = mmap.mmap(self.fd, size) if size else None  # an empty file cannot be mapped
        self.view = memoryview(b"") if self._mapping is None else memoryview(self._mapping)  # its bytes

    def copy_from(self, tensors: Sequence[Tensor]) -> None:
        """Copy tensors into the buffer one after the other, as in a checkpoint."""
        if self._mapping is None:
            return
        target, begin = torch.frombuffer(self._mapping, dtype=torch.uint8), 0
        for each in tensors:
            # Copy bytes, since a tensor may start at any offset.
            source = each.detach().contiguous().view(-1).view(torch.uint8)
            target[begin : begin + source.numel()].copy_(source)
            begin += source.numel()

    def __del__(self) -> None:
        os.close(self.fd)  # the mapping is freed with its last view


class DoubleBuffer:
    """Two buffers, used in turn: before one is refilled, the replica server has discarded the step in it."""

    def __init__(self) -> None:
        self._send_buffers: list[SharedBuffer] = []

    def fill_next(self, tensors: Sequence[Tensor]) -> SharedBuffer:
        size = count_bytes(tensors)
        buffer = self._send_buffers.pop(0) if len(self._send_buffers) == 2 else None
        if buffer is None or buffer.size != size:
            buffer = SharedBuffer(size)
        self._send_buffers.append(buffer)
        buffer.copy_from(tensors)
        return buffer


def get_host_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def count_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(each.numel() * each.element_size() for each in tensors)


_CHUNK_BYTES = 1 << 20
_CHUNKS_PER_SECOND = 20
_NUM_STEPS_HELD = 2  # Steps in memory at a time: the last complete one, and the one being written


class StateReplicator:
    """Copy steps to memory; see [Note: copies]. A context manager. All methods are collective."""

    def __init__(
        self,
        manager: StrategyManager,
        client: ReplicaClient,
        *,
        run_id: str,
        start_step: int,
        every: int = 1,
        bandwidth: float | None = None,
        signing_key: SigningKey | None = None,
        memory_bytes: int,
        report: Callable[..., None],
    ) -> None:
        self._manager, self._client, self._run_id = manager, client, run_id
        self._every, self._bandwidth, self._signing_key, self._report = every, bandwidth, signing_key, report
        self._memory_bytes = memory_bytes
        self._group, self._agreement, self._send_buffers = new_group("gloo"), SavePlanner(), DoubleBuffer()
        self._thread: threading.Thread | None = None
        self._connections: list[Connection] = []
        self._error, self._is_disabled = "", False
        self._checked_agreement = 0
        self.num_copied = self.num_skipped = 0
        self.last_step: int | None = None  # the last complete step; None before the first
        client.discard_stale(run_id, start_step, manager.mesh.world)

    def is_due(self, step: int) -> bool:
        return not self._is_disabled and step % self._every == 0

    def replicate(
        self, step: int, *, scheduler: LRScheduler | None = None, extra: Callable[[], Mapping[str, Any]] = dict
    ) -> None:
        """Copy the state after `step` steps, unless a rank is still sending the previous copy. Collective."""
        if not self._is_ready(step):
            return
        content = collect_content(
            self._manager, self._group, step=step, scheduler=scheduler, extra=extra(), planner=self._agreement
        )
        self._check_memory(count_bytes(content.tensors))
        buffer = self._send_buffers.fill_next(content.tensors)
        self._thread = threading.Thread(
            target=self._send_in_background, args=(content, buffer, step), name="meshwright-replication"
        )
        self._thread.start()

    def _is_ready(self, step: int) -> bool:
        is_busy = self._thread is not None and self._thread.is_alive()
        busy, failed = self._manager.mesh.world.reduce_ints([is_busy, bool(self._error)])
        is_first = self._manager.mesh.rank == 0
        if failed and not busy:
            self._is_disabled = True
            if is_first:
                warn(
                    f"state is no longer copied to memory from step {step} on: {self._error or 'a rank failed'}. The "
                    f"run continues, and checkpoints are saved as before.",
                    stacklevel=4,
                )
            return False
        if not busy:
            return True
        self.num_skipped += 1
        if is_first and self.num_skipped & (self.num_skipped - 1) == 0:
            self._report(num_copied=self.num_copied, num_skipped=self.num_skipped, step=step)
        return False

    def _check_memory(self, local_bytes: int) -> None:
        """Raise ConfigError if copies do not fit into memory; checked for each new plan of the state. Collective."""
        if self._checked_agreement == self._agreement.num_plans:
            return
        self._checked_agreement, world = self._agreement.num_plans, self._manager.mesh.world
        sizes = self._gather_sizes(local_bytes)
        nodes, here = self._client.nodes, self._client.local_node
        stored = [here, (here - 1) % len(nodes)] if len(nodes) > 1 else [here]
        needed = _NUM_STEPS_HELD * sum(sizes[rank] for number in stored for rank in nodes[number].ranks)
        message = (
            f"checkpoint.replicate holds {_NUM_STEPS_HELD} copies of each rank's state, {needed / 1e9:,.1f} GB on "
            f"this node, which has {self._memory_bytes / 1e9:,.1f} GB of memory. Use more nodes, or "
            "checkpoint.replicate=null."
        )
        world.raise_on_all_ranks(ConfigError(message) if needed > self._memory_bytes else None)

    def _gather_sizes(self, local_bytes: int) -> list[int]:
        sizes: list[int] = [0] * self._manager.mesh.world.size
        dist.all_gather_object(sizes, local_bytes, group=self._group)
        return sizes

    def _send_in_background(self, content: CheckpointContent, buffer: SharedBuffer, step: int) -> None:
        try:
            error, files = "", {}
            try:
                files = self._send_files(content, buffer, step)
            except Exception as caught:
                # The other ranks wait for this one's result.
                error = f"rank {self._manager.mesh.rank}: {caught}"
            manifest, error = self._gather_manifest(content, error, files)
            if manifest is None:
                self._error = error
                return
            self._connections[0].request("commit", run=self._run_id, step=step, manifest=manifest)
            self.num_copied, self.last_step = self.num_copied + 1, step
        except Exception as caught:
            # The replica server was killed, or another rank is gone, which the main thread also notices.
            self._error = f"{type(caught).__name__}: {caught}"

    def _send_files(self, content: CheckpointContent, buffer: SharedBuffer, step: int) -> dict[str, StoredFile]:
        """Send this rank's files to the replica servers; return their sizes and checksums."""
        client, next_node = self._client, self._client.next_node
        if not self._connections:
            nodes = [client.local_node] + ([] if next_node is None else [next_node])
            self._connections = [client.connect(node) for node in nodes]
        own, *others = self._connections
        payload = tensors_file_name(self._manager.mesh.rank)
        files = {payload: _describe_file(buffer.view)}
        own.request("put", buffer.fd, run=self._run_id, step=step, name=payload, size=buffer.size)
        for connection in others:
            self._send_file(connection, step, payload, buffer.view)
        for name, text in content.other_files.items():
            for connection in self._connections:
                self._send_file(connection, step, name, memoryview(text))
            files[name] = _describe_file(text)
        return files

    def _send_file(self, connection: Connection, step: int, name: str, view: memoryview) -> None:
        connection.request("put", None, self._throttle(view), run=self._run_id, step=step, name=name, size=view.nbytes)

    def _throttle(self, view: memoryview) -> Iterator[memoryview]:
        """Yield chunks of a buffer, no faster than the bandwidth allows."""
        began, rate = time.monotonic(), self._bandwidth
        chunk = _CHUNK_BYTES if rate is None else max(1, min(_CHUNK_BYTES, int(rate / _CHUNKS_PER_SECOND)))
        for begin in range(0, view.nbytes, chunk):
            if rate is not None:
                time.sleep(max(0.0, began + begin / rate - time.monotonic()))
            yield view[begin : begin + chunk]

    def _gather_manifest(
        self, content: CheckpointContent, error: str, files: Mapping[str, StoredFile]
    ) -> tuple[str | None, str]:
        """Return the manifest of a step after all ranks have sent their files, or None and an error. Collective."""
        is_first = self._manager.mesh.rank == 0
        found: list[Any] = [None] * self._manager.mesh.world.size
        dist.gather_object((error, dict(files)), found if is_first else None, group=self._group, group_dst=0)
        box: list[Any] = [(None, "")]
        if is_first:
            errors = "; ".join([each for each, _ in found if each][:5])
            every = {name: stored for _, each in found for name, stored in each.items()}
            # Tensor files first, so that each rank verifies its own part if the number of ranks is the same.
            ordered = dict(sorted(every.items(), key=lambda each: (not each[0].startswith("tensors-"), each[0])))
            box[0] = (
                None if errors else serialize_manifest(replace(content.manifest, files=ordered), self._signing_key),
                errors,
            )
        dist.broadcast_object_list(box, group=self._group, group_src=0)
        result: tuple[str | None, str] = box[0]
        return result

    def close(self) -> None:
        """Wait for the last copy, and make the servers discard all steps of the finished run. Collective."""
        if self._thread is not None:
            self._thread.join()
        if self._manager.mesh.rank == 0:
            self._report(num_copied=self.num_copied, num_skipped=self.num_skipped)
        if not self._manager.mesh.world.reduce_ints([bool(self._error)])[0]:
            self._client.discard_stale(self._run_id, -1, self._manager.mesh.world)
        for connection in self._connections:
            connection.close()
        dist.destroy_process_group(self._group)

    def __enter__(self) -> StateReplicator:
        return self

    def __exit__(self, error_type: object, error: object, traceback: object) -> None:
        if isinstance(error, Stopped) and self._thread is not None:
            # All ranks stop regularly, and others may still wait for this rank's copy.
            self._thread.join()
        # After an error the other ranks may never get here.
        if error_type is None:
            self.close()


def _describe_file(view: memoryview | bytes) -> StoredFile:
    return StoredFile(memoryview(view).nbytes, hashlib.sha256(view).hexdigest())


class MemoryReplication:
    """Implementation of `StateReplication`. Creating it is collective, and raises like `open_replica_client`."""

    def __init__(self, world: World) -> None:
        self._client = open_replica_client(world)

    def list_replicas(self, world: World, run_id: str, options: StorageOptions) -> list[tuple[int, ReplicaReader]]:
        readers = find_replicas(self._client, self._client.list_steps(world), run_id, options)
        return [(reader.step, reader) for reader in readers]

    @contextmanager
    def replicate(
        self, manager: StrategyManager, scheduler: Any, *, start_step: int, **options: Any
    ) -> Iterator[LoopExtension]:
        """Copy the state during training; `options` are those of `StateReplicator`."""
        with StateReplicator(
            manager, self._client, start_step=start_step, memory_bytes=get_host_memory(), **options
        ) as replicator:
            yield _ReplicationExtension(manager, replicator, scheduler)


class _ReplicationExtension(LoopExtension):
    """Copy the state after the steps that are due, and add the time to the result of the next step."""

    def __init__(self, manager: StrategyManager, replicator: StateReplicator, scheduler: Any) -> None:
        self._progress, self._replicator, self._scheduler = manager.mesh.world.progress, replicator, scheduler
        self._times: dict[str, float] = {}

    def process_result(self, result: StepResult) -> StepResult:
        times, self._times = self._times, {}
        return replace(result, times={**result.times, **times}) if times else result

    def finish_step(self, step: int, prepare_extra: Callable[[], dict[str, Any]]) -> None:
        if not self._replicator.is_due(step):
            return
        start = time.perf_counter()
        self._progress.enter_phase("replicate")
        with profiler_phase("replicate"):
            self._replicator.replicate(step, scheduler=self._scheduler, extra=prepare_extra)
        self._times = {"replicate": time.perf_counter() - start}

"""Model of torch's caching allocator: memory that it reserves for the blocks of a step.

[Note: the allocator] With expandable segments, each pool is one address range that grows at its end, in granules of
2 MiB for blocks up to 1 MiB and of 20 MiB for larger ones. Sizes are multiples of 512 B. A request splits the smallest
free block that is large enough; the block at the growing end is used last. Adjacent free blocks are merged. Each stream
has its own two pools, and no memory is returned to the device.

[Note: fixed segments] Without expandable segments, a request that fits into no free block allocates a segment: 2 MiB
for up to 1 MiB, 20 MiB for less than 10 MiB, else its size rounded up to 2 MiB. Free blocks are merged only within a
segment, and a large block is split only if more than 1 MiB remains.

[Note: streams of sharded data parallelism] FSDP allocates all-gather buffers on one stream, and reduce-scatter buffers
and gradients on another. A trace uses no streams, so the first operators that access a block determine its stream.

Source: c10/cuda/CUDACachingAllocator.cpp of torch 2.13 (`get_pool`, `get_free_block`, `should_split`,
`try_allocate_expandable_block`, `free_block`); torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping

from meshwright.plugin import uses_expandable_segments

from .trace import Operation, StepTrace

MIN_BLOCK_SIZE = 512
SMALL_SIZE = 1 << 20
SMALL_BUFFER, LARGE_BUFFER = 2 << 20, 20 << 20
COMPUTE, GATHER, REDUCE = "compute", "gather", "reduce"


class _BlockPool:
    """Live and free blocks of one pool. `mapped`: device bytes; `live`: (start, bytes) of each live block."""

    def __init__(self, *, is_small: bool, is_expandable: bool) -> None:
        self.mapped = 0
        self.live: dict[int, tuple[int, int]] = {}
        self._is_small, self._is_expandable = is_small, is_expandable
        self._min_remaining = 0 if is_small or is_expandable else SMALL_SIZE
        self._next_start = 0
        self._free_by_size: list[tuple[int, int]] = []  # free blocks by size, by start and by end
        self._free_by_start: dict[int, int] = {}
        self._free_by_end: dict[int, int] = {}

    def allocate(self, block: int, size: int) -> None:
        """Allocate `size` bytes, or a complete free block if the remainder would be too small to split off."""
        index = bisect.bisect_left(self._free_by_size, (size, -1))
        at_end = self._free_by_end.get(self.mapped) if self._is_expandable else None
        if index + 1 < len(self._free_by_size) and self._free_by_size[index][1] == at_end:
            index += 1
        if index < len(self._free_by_size):
            free, start = self._free_by_size[index]
            self._remove_free(start, free)
        else:
            start, free = self._grow(size) if self._is_expandable else self._allocate_segment(size)
        if free - size > self._min_remaining:
            self._add_free(start + size, free - size)
            free = size
        self.live[block] = (start, free)

    def free(self, block: int) -> None:
        start, size = self.live.pop(block)
        before, behind = self._free_by_end.get(start), self._free_by_start.get(start + size)
        if behind is not None:
            self._remove_free(start + size, behind)
            size += behind
        if before is not None:
            self._remove_free(before, start - before)
            start, size = before, size + start - before
        self._add_free(start, size)

    def _grow(self, size: int) -> tuple[int, int]:
        """Map new memory after the free block at the end. Return start and size of the combined free block."""
        granule = SMALL_BUFFER if self._is_small else LARGE_BUFFER
        start = self._free_by_end.get(self.mapped, self.mapped)
        free = self.mapped - start
        if free:
            self._remove_free(start, free)
        missing = -(-(size - free) // granule) * granule
        self.mapped += missing
        return start, free + missing

    def _allocate_segment(self, size: int) -> tuple[int, int]:
        multiple = -(-size // SMALL_BUFFER) * SMALL_BUFFER
        free = SMALL_BUFFER if self._is_small else LARGE_BUFFER if size < LARGE_BUFFER // 2 else multiple
        self.mapped += free
        start = self._next_start
        self._next_start += free + 1  # a gap of one byte keeps blocks of two segments from being merged
        return start, free

    def _add_free(self, start: int, size: int) -> None:
        bisect.insort(self._free_by_size, (size, start))
        self._free_by_start[start] = size
        self._free_by_end[start + size] = start

    def _remove_free(self, start: int, size: int) -> None:
        del self._free_by_size[bisect.bisect_left(self._free_by_size, (size, start))]
        del self._free_by_start[start], self._free_by_end[start + size]


class Allocator:
    """Pools of all streams. By default, this environment decides whether segments are expandable."""

    def __init__(self, *, expandable: bool | None = None) -> None:
        self._is_expandable = uses_expandable_segments() if expandable is None else expandable
        self._pools: dict[tuple[str, bool], _BlockPool] = {}
        self._pool_by_block: dict[int, _BlockPool] = {}
        self.allocated = 0

    @property
    def reserved(self) -> int:
        return sum(each.mapped for each in self._pools.values())

    def update(self, block: int, delta: int, stream: str = COMPUTE) -> None:
        """Allocate a block of `delta` bytes, or free it if `delta` < 0. Free a block before you resize it."""
        if delta > 0:
            size = -(-delta // MIN_BLOCK_SIZE) * MIN_BLOCK_SIZE
            is_small = size <= SMALL_SIZE
            if (stream, is_small) not in self._pools:
                self._pools[stream, is_small] = _BlockPool(is_small=is_small, is_expandable=self._is_expandable)
            self._pool_by_block[block] = self._pools[stream, is_small]
            self._pool_by_block[block].allocate(block, size)
            self.allocated += self._pool_by_block[block].live[block][1]
        elif delta < 0:
            pool = self._pool_by_block.pop(block)
            self.allocated -= pool.live[block][1]
            pool.free(block)


def compute_reserved_bytes(trace: StepTrace, *, workspace: int = 0) -> int:
    """Return the bytes that the allocator has reserved after a step, with `workspace` bytes allocated throughout."""
    return replay_allocations(trace.memory_log, assign_streams(trace.operations), workspace=workspace).reserved


def replay_allocations(log: Iterable[tuple[int, int]], streams: Mapping[int, str], *, workspace: int = 0) -> Allocator:
    """Return an allocator after all changes of a log. Blocks that are not in `streams` use the compute stream."""
    allocator = Allocator()
    allocator.update(-1, workspace)
    sizes: dict[int, int] = {}
    for block, change in log:
        held = sizes.get(block, 0)
        if held:
            allocator.update(block, -held)
        sizes[block] = held + change
        if sizes[block]:
            allocator.update(block, sizes[block], streams.get(block, COMPUTE))
    return allocator


def assign_streams(operations: Iterable[Operation]) -> dict[int, str]:
    """Return the stream of each block outside the compute stream; see [Note: streams of sharded data parallelism]."""
    streams: dict[int, str] = {}
    seen: set[int] = set()
    is_reducing = False
    for each in operations:
        if each.name.startswith("aten.empty"):
            continue
        written = [block for block, _ in each.writes if block not in seen]
        is_reducing = is_reducing and all(streams.get(block) == REDUCE for block, _ in each.reads)
        if each.name.startswith("fsdp.all_gather_copy_in"):
            streams |= dict.fromkeys(written, GATHER)
        elif each.name.startswith("c10d._reduce_scatter_base") or is_reducing:
            # Operators that read only reduced blocks cast them to the dtype of the parameters.
            streams |= dict.fromkeys(written, REDUCE)
            is_reducing = True
        seen |= {block for block, _ in (*each.reads, *each.writes)}
    return streams

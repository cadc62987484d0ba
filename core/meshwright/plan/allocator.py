"""What torch's caching allocator takes from a device for the memory that a step holds.

[Note: the allocator] With expandable segments each pool is one range of addresses that grows at its end, by granules
of 2 MiB for blocks of up to 1 MiB and of 20 MiB for larger ones; sizes are multiples of 512 B. A request takes the
smallest free block that is large enough, and splits it; the free block at the end of the range, which can grow, only
if there is no other. Neighbours that are free become one. What was taken is not given back. Memory of a stream is
reused on that stream alone, so each has its own two pools.

[Note: fixed segments] Without expandable segments a request that no free block can hold takes a segment of its own:
2 MiB for up to 1 MiB, 20 MiB for less than 10 MiB, else its size in multiples of 2 MiB. Free neighbours become one
within a segment alone, and a large block is split only if more than 1 MiB is left. `meshwright.launch.allocator` says
which of the two is in force. What torch gives back before it runs out of memory is left out.

[Note: streams of sharded data parallelism] FSDP gathers into memory of a stream for gathering, and reduces into memory
of a stream for reducing, where gradients stay; all else is the computing stream's. A trace runs on no streams: whose a
block is follows from the operators that it is first touched by.

Source: c10/cuda/CUDACachingAllocator.cpp of torch 2.13 (`get_pool`, `get_free_block`, `should_split`,
`try_allocate_expandable_block`, `free_block`), and torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py for the
streams.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping

from ..launch.allocator import uses_expandable_segments
from .trace import Operation, Trace

ROUND_TO = 512
SMALL = 1 << 20
SMALL_GRANULE, LARGE_GRANULE = 2 << 20, 20 << 20
COMPUTE, GATHER, REDUCE = "compute", "gather", "reduce"


class _Pool:
    """Blocks of one pool, held and free; see [Note: the allocator].

    Attributes:
        mapped: bytes that were taken from the device.
        live: (start, bytes) of each block that is held.
    """

    def __init__(self) -> None:
        self.mapped = 0
        self.live: dict[int, tuple[int, int]] = {}
        # Free blocks: by size, and their two ends.
        self._sizes: list[tuple[int, int]] = []
        self._starts: dict[int, int] = {}
        self._ends: dict[int, int] = {}

    def take(self, block: int, size: int) -> None:
        """Hold so many bytes."""
        raise NotImplementedError

    def free(self, block: int) -> None:
        """Give back what a block holds; neighbours that are free join it."""
        start, size = self.live.pop(block)
        before, behind = self._ends.get(start), self._starts.get(start + size)
        if behind is not None:
            self._forget(start + size, behind)
            size += behind
        if before is not None:
            self._forget(before, start - before)
            start, size = before, size + start - before
        self._note(start, size)

    def _note(self, start: int, size: int) -> None:
        bisect.insort(self._sizes, (size, start))
        self._starts[start] = size
        self._ends[start + size] = start

    def _forget(self, start: int, size: int) -> None:
        del self._sizes[bisect.bisect_left(self._sizes, (size, start))]
        del self._starts[start], self._ends[start + size]


class Segment(_Pool):
    """One range of addresses that grows; see [Note: the allocator]."""

    def __init__(self, granule: int) -> None:
        super().__init__()
        self._granule = granule

    def take(self, block: int, size: int) -> None:
        """Hold so many bytes."""
        found = bisect.bisect_left(self._sizes, (size, -1))
        last = self._ends.get(self.mapped)
        if found < len(self._sizes) and self._sizes[found][1] == last and found + 1 < len(self._sizes):
            found += 1
        if found < len(self._sizes):
            free, start = self._sizes[found]
            self._forget(start, free)
        else:
            start, free = self._grown(size)
        if free > size:
            self._note(start + size, free - size)
        self.live[block] = (start, size)

    def _grown(self, size: int) -> tuple[int, int]:
        """The free block at the end, with enough of new memory behind it."""
        start = self._ends.get(self.mapped, self.mapped)
        free = self.mapped - start
        if free:
            self._forget(start, free)
        missing = -(-(size - free) // self._granule) * self._granule
        self.mapped += missing
        return start, free + missing


class FixedSegments(_Pool):
    """Segments that do not grow; see [Note: fixed segments]."""

    def __init__(self, *, is_small: bool) -> None:
        super().__init__()
        self._is_small = is_small
        self._next = 0

    def take(self, block: int, size: int) -> None:
        """Hold so many bytes, or all of a free block that is not worth splitting."""
        found = bisect.bisect_left(self._sizes, (size, -1))
        if found < len(self._sizes):
            free, start = self._sizes[found]
            self._forget(start, free)
        else:
            free, start = self._segment_bytes(size), self._next
            self.mapped += free
            # A gap of one byte, so that blocks of two segments are no neighbours.
            self._next += free + 1
        left = free - size
        if left >= ROUND_TO if self._is_small else left > SMALL:
            self._note(start + size, left)
            free = size
        self.live[block] = (start, free)

    def _segment_bytes(self, size: int) -> int:
        if self._is_small:
            return SMALL_GRANULE
        return LARGE_GRANULE if size < LARGE_GRANULE // 2 else -(-size // SMALL_GRANULE) * SMALL_GRANULE


class Allocator:
    """Pools of all streams; see the module.

    Args:
        expandable: None: as runs have it that are started from this environment.

    Attributes:
        allocated: bytes that are held.
    """

    def __init__(self, *, expandable: bool | None = None) -> None:
        self._is_expandable = uses_expandable_segments() if expandable is None else expandable
        self._segments: dict[tuple[str, bool], _Pool] = {}
        self._of: dict[int, _Pool] = {}
        self.allocated = 0

    @property
    def reserved(self) -> int:
        """Bytes that were taken from the device."""
        return sum(each.mapped for each in self._segments.values())

    def change(self, block: int, change: int, stream: str = COMPUTE) -> None:
        """A block is made (more), or ends (less); it is resized by ending first."""
        if change > 0:
            size = -(-change // ROUND_TO) * ROUND_TO
            is_small = size <= SMALL
            if (stream, is_small) not in self._segments:
                self._segments[stream, is_small] = self._pool(is_small)
            self._of[block] = self._segments[stream, is_small]
            self._of[block].take(block, size)
            self.allocated += self._of[block].live[block][1]
        elif change < 0:
            segment = self._of.pop(block)
            self.allocated -= segment.live[block][1]
            segment.free(block)

    def _pool(self, is_small: bool) -> _Pool:
        if not self._is_expandable:
            return FixedSegments(is_small=is_small)
        return Segment(SMALL_GRANULE if is_small else LARGE_GRANULE)


def reserved(found: Trace, *, workspace: int = 0) -> int:
    """Bytes that the allocator has taken when a step has run, over and over again.

    Args:
        workspace: of the libraries of the device, which is held throughout.
    """
    return replay(found.log, streams(found.operations), workspace=workspace).reserved


def replay(log: Iterable[tuple[int, int]], streams: Mapping[int, str], *, workspace: int = 0) -> Allocator:
    """An allocator after all changes of a log; blocks are of the computing stream where `streams` does not tell."""
    allocator = Allocator()
    allocator.change(-1, workspace)
    sizes: dict[int, int] = {}
    for block, change in log:
        stream = streams.get(block, COMPUTE)
        held = sizes.get(block, 0)
        if held:
            allocator.change(block, -held)
        sizes[block] = held + change
        if sizes[block]:
            allocator.change(block, sizes[block], stream)
    return allocator


def streams(operations: Iterable[Operation]) -> dict[int, str]:
    """Blocks that are not of the computing stream; see [Note: streams of sharded data parallelism]."""
    found: dict[int, str] = {}
    seen: set[int] = set()
    is_reducing = False
    for each in operations:
        if each.name.startswith("aten.empty"):
            continue
        written = [block for block, _ in each.writes if block not in seen]
        is_reducing = is_reducing and all(found.get(block) == REDUCE for block, _ in each.reads)
        if each.name.startswith("fsdp.all_gather_copy_in"):
            found |= dict.fromkeys(written, GATHER)
        elif each.name.startswith("c10d._reduce_scatter_base"):
            found |= dict.fromkeys(written, REDUCE)
            is_reducing = True
        elif is_reducing:
            # The same in the dtype of the parameters.
            found |= dict.fromkeys(written, REDUCE)
        seen |= {block for block, _ in (*each.reads, *each.writes)}
    return found

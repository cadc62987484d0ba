"""Time of a step: a simulation of its traced operators on the streams of a device.

[Note: streams] The host issues operators in order and runs ahead of the device. A device computes on one stream, and
the collectives of each group run in order on a stream of their own. An operator waits for the last writer, on another
stream, of the memory that it reads or writes. So communication overlaps with operators that do not depend on it.

[Note: FSDP synchronization] FSDP gathers a unit only when the unit before the last has been copied out of its buffer,
and packs gradients only when those of the previous unit have been reduced
(torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py: `wait_for_unshard`, `post_backward`).

[Note: hosts] A CPU is its own host: it has one computing stream, and issues nothing while it computes. Separate threads
on the same cores run the collectives, which slows computing down. Accelerators can be slowed down too: `overlap_speed`.

[Note: the slowest device] Devices of one kind differ in speed, and each step waits for all of them. So all are assumed
to compute at the speed of the slowest.

[Note: pipelines] All stages are simulated together. A message is sent when it is computed and arrives after the time of
its link; the operator that reads it waits. Pipeline bubbles follow from this.

[Note: rings and trees] On a ring over n ranks and m nodes, all-gather and reduce-scatter take n - 1 steps, of which
m - 1 are between nodes; all-reduce takes twice as many. Each device sends nearly the full tensor within its node; the
traffic that enters a node is divided over the group's devices there, each with its own link. On a tree, all-reduce
takes steps in proportion to log2(m), at `TREE_BANDWIDTH_RATIO` times the bandwidth of a ring, so it is faster for small
messages. NCCL chooses its algorithm with this model (NVIDIA/nccl, src/graph/tuning.cc).

[Note: causal attention] Attention computes two products for each pair of a query and a key that attend to each other,
and its backward five (Dao, arXiv:2307.08691). Without a mask and without `is_causal`, all pairs attend. A mask is taken
as causal, with the last query at the position of the last key, as for the parts of a sequence in context parallelism.

[Note: grouped products] A grouped matrix product, as of experts, is as fast as the product of one group: the rows of
all groups, which are the largest size, are divided by the number of groups.

[Note: fusion] Compiled code runs consecutive operators other than matrix products as one kernel. It reads what the
operators have not written themselves, and writes what is read later.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from meshwright.plugin import EXPERT_AXES, ROOT_AXES, VIEWS, Degrees, MeshError

from .allocator import COMPUTE, GATHER, REDUCE, assign_streams
from .config import DeviceSpec, NodeSpec
from .trace import Operation, StepTrace

MESSAGE_KINDS = ("send", "recv", "recv_any_source")
TREE_BANDWIDTH_RATIO = 0.5 / 3.8
"""Bandwidth of a tree relative to a ring: it sends up and down, and short messages carry flags with their data."""


def find_group_ranks(group: str, rank: int, degrees: Degrees, size: int) -> list[int]:
    """Return the ranks of the group of `rank` along an axis or view; for other names, `size` consecutive ranks."""
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


def estimate_collective_seconds(kind: str, size: float, ranks: Sequence[int], node: NodeSpec) -> float:
    """Return the time [s] of a collective on a tensor of `size` bytes, once all ranks have called it."""
    count, nodes = len(ranks), len({rank // node.ranks for rank in ranks})
    if count == 1:
        return 0.0
    size = size * node.slowdown_factors.get("send" if kind in MESSAGE_KINDS else kind, 1.0)
    outer = node.intra_node if nodes == 1 else node.inter_node
    if kind in MESSAGE_KINDS:
        return outer.ring_step_latency_s + size / outer.effective_bandwidth
    near, away = compute_bytes_sent(kind, size, ranks, node)
    carried = max(near / node.intra_node.effective_bandwidth, away / node.inter_node.effective_bandwidth)
    if kind == "all_to_all":
        return node.ring_base_latency_s + outer.ring_step_latency_s + carried
    here, rounds = count / nodes, 2 if kind == "all_reduce" else 1
    ring_steps = (count - nodes) * node.intra_node.ring_step_latency_s + (
        nodes - 1
    ) * node.inter_node.ring_step_latency_s
    ring = node.ring_base_latency_s + (rounds * ring_steps + carried)
    if kind not in ("all_reduce", "broadcast"):
        return ring
    rate = (
        node.intra_node.effective_bandwidth
        if nodes == 1
        else min(node.intra_node.effective_bandwidth, here * node.inter_node.effective_bandwidth)
    ) * TREE_BANDWIDTH_RATIO
    steps = (here - 1) * node.intra_node.tree_step_latency_s + math.log2(nodes) * node.inter_node.tree_step_latency_s
    return min(ring, node.tree_base_latency_s + rounds * steps + size / rate)


def compute_bytes_sent(kind: str, size: float, ranks: Sequence[int], node: NodeSpec) -> tuple[float, float]:
    """Return the bytes that each device sends within its node and to other nodes, on a ring."""
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


VIEW_COST = 0.2  # Host time of an operator that launches no kernel, relative to one that does
HOST_ONLY_PREFIXES = ("aten.empty", "aten.new_empty", "aten.lift_fresh", "prim.")
_GATHER_OPS = ("embedding", "index_select", "index.Tensor", "gather.default", "slice_scatter")


def is_kernel(operation: Operation) -> bool:
    """Return whether an operator launches a kernel; views and empty tensors need only the host."""
    return bool(operation.writes) and not operation.name.startswith(HOST_ONLY_PREFIXES)


def estimate_kernel_seconds(operation: Operation, device: DeviceSpec, relative_speed: float = 1.0) -> float:
    """Return the time [s] of an operator alone on the device; arithmetic runs at `relative_speed` times its speed."""
    moved = sum(size for _, size in (*operation.reads, *operation.writes))
    if any(name in operation.name for name in _GATHER_OPS):
        moved = min(moved, 2 * sum(size for _, size in operation.writes))
    memory = moved / (device.bandwidth * device.bandwidth_efficiency)
    return max(device.min_kernel_s, memory, _estimate_arithmetic_seconds(operation, device) / relative_speed)


def _estimate_arithmetic_seconds(operation: Operation, device: DeviceSpec) -> float:
    if not operation.flops:
        return 0.0
    dtype = str(operation.dtype).removeprefix("torch.")
    dtype = "float8" if dtype.startswith("float8") else dtype
    known = dtype if dtype in device.flops else "float32"
    if "attention" in operation.name:
        is_backward = "backward" in operation.name
        reached = device.attention_backward_efficiency if is_backward else device.attention_efficiency
        return operation.flops / (device.flops[known] * reached)
    sizes = [size for shape in [each for each in operation.shapes if len(each) > 1][-2:] for size in shape[-2:]]
    # See [Note: grouped products].
    groups = next((shape[0] for shape in operation.shapes[2:] if len(shape) == 1), 1)
    return operation.flops / device.matmul_rate(known, min(*sizes, max(sizes) // groups) if sizes else 1)


def fuse_operations(operations: Sequence[Operation]) -> list[Operation]:
    """Return the operations that compiled code runs; see [Note: fusion]."""
    last = {block: index for index, each in enumerate(operations) for block, _ in (*each.reads, *each.writes)}
    found: list[Operation] = []
    chain: list[Operation] = []
    for index, each in enumerate(operations):
        if each.flops or each.collective_index is not None or each.name.startswith("fsdp."):
            found += [*_fuse_chain(chain, index, last), each]
            chain = []
        else:
            chain.append(each)
    return found + _fuse_chain(chain, len(operations), last)


def _fuse_chain(chain: Iterable[Operation], end: int, last: dict[int, int]) -> list[Operation]:
    """Fuse a chain that ends before index `end` into one operation; return none if no output is read later."""
    kernels = [each for each in chain if is_kernel(each)]
    reads: dict[int, int] = {}
    writes: dict[int, int] = {}
    for each in kernels:
        for block, size in each.reads:
            if block not in writes:
                reads[block] = max(reads.get(block, 0), size)
        for block, size in each.writes:
            writes[block] = max(writes.get(block, 0), size)
    kept = tuple((block, size) for block, size in writes.items() if last[block] >= end)
    if not kept:
        return []
    size = sum(reads.values()) + sum(size for _, size in kept)
    dtype, logged, phase = kernels[0].dtype, kernels[-1].log_length, kernels[-1].phase
    return [Operation("fused", 0, size, (), dtype, None, tuple(reads.items()), kept, log_length=logged, phase=phase)]


MessageId: TypeAlias = tuple[int, int, int]  # Sender, receiver, and number of the message between them


@dataclass(frozen=True)
class TimelineSpan:
    """One operator on a stream, from `start` to `end` [s]; `log_length` and `phase` are those of the operation."""

    stream: str
    name: str
    start: float
    end: float
    log_length: int = 0
    phase: str = ""


@dataclass(frozen=True)
class Timeline:
    """A simulated step of one rank: its time, and its spans in the order of issue."""

    rank: int
    seconds: float
    spans: tuple[TimelineSpan, ...]

    def busy_seconds(self, stream: str = COMPUTE) -> float:
        return sum(each.end - each.start for each in self.spans if each.stream == stream)


def simulate_timelines(
    traces: Sequence[StepTrace], degrees: Degrees, device: DeviceSpec, **options: Any
) -> list[Timeline]:
    """Simulate a step on ranks that send messages only to each other; `options` are those of `_RankSimulator`."""
    sent: dict[MessageId, float] = {}
    ranks = [_RankSimulator(trace, degrees, device, sent, **options) for trace in traces]
    waiting = {rank.trace.rank: rank.run() for rank in ranks}
    while waiting:
        known = len(sent)
        done = [number for number, run in waiting.items() if all(message in sent for message in run)]
        for number in done:
            del waiting[number]
        if waiting and not done and len(sent) == known:
            raise MeshError(f"ranks {sorted(waiting)} wait for messages that no traced rank sends.")
    return [Timeline(rank.trace.rank, rank.end, tuple(rank.spans)) for rank in ranks]


@dataclass
class _RankSimulator:
    trace: StepTrace
    degrees: Degrees
    device: DeviceSpec
    arrival_times: dict[MessageId, float]
    is_compiled: bool = False  # whether operators are fused; see [Note: fusion]
    chunked_groups: Collection[str] = ()  # groups whose collectives overlap with computing on chunks that have arrived
    waits_for_messages: bool = True  # False: messages have arrived when they are read
    host_time: float = 0.0
    stream_free_at: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    written_at: dict[int, tuple[str, float]] = field(default_factory=dict)
    pending_messages: dict[int, MessageId] = field(default_factory=dict)
    copy_out_times: list[float] = field(default_factory=list)
    last_reduced_at: float = 0.0
    collective_spans: list[tuple[float, float]] = field(default_factory=list)
    longest_collective: float = 0.0
    message_counts: dict[tuple[int, int], int] = field(default_factory=lambda: defaultdict(int))
    spans: list[TimelineSpan] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.relative_speed = self.device.straggler_speed(self.degrees.world_size)  # see [Note: the slowest device]

    @property
    def end(self) -> float:
        return max(self.host_time, *self.stream_free_at.values())

    def run(self) -> Iterator[MessageId]:
        """Simulate all operators; yield each message that must be sent before the simulation can continue."""
        operations = self.trace.operations
        of_stream = assign_streams(operations)
        for each in fuse_operations(operations) if self.is_compiled else operations:
            for block, _ in (*each.reads, *each.writes):
                message = self.pending_messages.get(block)
                if message is not None and each.collective_index is None:
                    while message not in self.arrival_times:
                        yield message
                    self.written_at[block] = ("message", self.arrival_times[self.pending_messages.pop(block)])
            if each.collective_index is not None:
                self._communicate(each, of_stream)
            elif is_kernel(each):
                self._compute(each, of_stream)
            else:
                self.host_time += VIEW_COST * self.device.launch_overhead_s

    def _compute(self, operation: Operation, of_stream: dict[int, str]) -> None:
        blocks = [block for block, _ in (*operation.reads, *operation.writes)]
        after = 0.0
        if self.device.is_host:
            stream = COMPUTE
        elif operation.name.startswith("fsdp.all_gather_copy_in"):
            stream = GATHER
            after = self.copy_out_times[-2] if len(self.copy_out_times) > 1 else 0.0
        else:
            stream = REDUCE if all(of_stream.get(block) == REDUCE for block in blocks) else COMPUTE
        if operation.name.startswith("fsdp.chunk_cat") and not self.device.is_host:
            after = self.last_reduced_at
        end = self._schedule(
            stream, operation, estimate_kernel_seconds(operation, self.device, self.relative_speed), after
        )
        if operation.name.startswith("fsdp.split_with_sizes_copy"):
            self.copy_out_times.append(end)

    def _communicate(self, operation: Operation, of_stream: dict[int, str]) -> None:
        call = self.trace.collectives[operation.collective_index or 0]
        ranks = find_group_ranks(call.group, self.trace.rank, self.degrees, call.num_ranks)
        if operation.peer is not None:
            self._exchange(operation, call.kind, ranks[operation.peer], call.nbytes)
            return
        took = estimate_collective_seconds(call.kind, call.nbytes, ranks, self.device.node)
        end = self._schedule(call.group, operation, took)
        if call.group in self.chunked_groups:
            self.written_at |= {
                block: (call.group, end - took * (1 - 1 / call.num_ranks)) for block, _ in operation.writes
            }
        if any(of_stream.get(block) == REDUCE for block, _ in operation.writes):
            self.last_reduced_at = end

    def _exchange(self, operation: Operation, kind: str, peer: int, size: int) -> None:
        ends = (self.trace.rank, peer) if kind == "send" else (peer, self.trace.rank)
        message = (*ends, self.message_counts[ends])
        self.message_counts[ends] += 1
        if kind == "send":
            self.arrival_times[message] = self._schedule(
                f"to {peer}", operation, estimate_collective_seconds(kind, size, ends, self.device.node)
            )
        else:
            self.host_time += self.device.launch_overhead_s
            if self.waits_for_messages:
                self.pending_messages |= {block: message for block, _ in operation.writes}

    def _schedule(self, stream: str, operation: Operation, duration: float, not_before: float = 0.0) -> float:
        """Add an operator to a stream, after the operators that it depends on, and return its end [s]."""
        self.host_time += self.device.launch_overhead_s
        known = [
            self.written_at[block] for block, _ in (*operation.reads, *operation.writes) if block in self.written_at
        ]
        ready = max((time for other, time in known if other != stream), default=0.0)
        start = max(self.host_time, self.stream_free_at[stream], ready, not_before)
        if operation.collective_index is None:
            end = self._find_compute_end(start, duration)
            self.host_time = end if self.device.is_host else self.host_time
        else:
            end = start + duration
            bisect.insort(self.collective_spans, (start, end))
            self.longest_collective = max(self.longest_collective, duration)
        self.stream_free_at[stream] = end
        self.written_at |= {block: (stream, end) for block, _ in operation.writes}
        self.spans.append(TimelineSpan(stream, operation.name, start, end, operation.log_length, operation.phase))
        return end

    def _find_compute_end(self, now: float, duration: float) -> float:
        """Return the end of `duration` seconds of computing that start at `now`; see [Note: hosts]."""
        speed = self.device.overlap_speed
        if speed == 1 or not duration:
            return now + duration
        for start, end in self.collective_spans[
            bisect.bisect(self.collective_spans, (now - self.longest_collective,)) :
        ]:
            if duration <= start - now:
                break
            duration -= max(0.0, start - now)
            now = max(now, start)
            overlapped = max(0.0, end - now) * speed
            if duration <= overlapped:
                return now + duration / speed
            duration -= overlapped
            now = max(now, end)
        return now + duration


def find_pipeline_ranks(rank: int, degrees: Degrees) -> list[int]:
    """Return the ranks of all pipeline stages that a rank exchanges messages with, including its own."""
    return find_group_ranks("pp", rank, degrees, degrees.pp)

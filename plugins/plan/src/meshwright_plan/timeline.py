"""How long a step takes: its traced operators, played on the streams of a device.

[Note: streams] The host issues operators in order and runs ahead of the device. A device computes on one stream, and
the collectives of each group run in order on a stream of their own. An operator waits for the last one on another
stream that has written what it reads or writes, so communication is hidden behind what does not need it.

[Note: waits of sharded data parallelism] FSDP gathers a unit only when the unit before the last has been copied out of
its buffer, and packs gradients only when those of the unit before have been reduced
(torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py: `wait_for_unshard`, `post_backward`).

[Note: hosts] A CPU is its own host: it has one computing stream, and issues nothing while it computes. Collectives are
carried by threads of their own on the same cores, so it computes less meanwhile. So may accelerators.

[Note: the slowest] Devices of one kind differ in speed, and each step waits for all: all compute as the slowest does.

[Note: pipelines] All stages are played together. A message leaves when it is made and arrives when the link has carried
it; whoever reads it waits. Bubbles follow from this.

[Note: rings and trees] A ring over n ranks on m nodes takes n - 1 steps to gather or to reduce and scatter, of which
m - 1 go between nodes, and twice as many to do both. Each device passes nearly the whole tensor on inside of its node;
what enters a node is shared by the group's devices there, each over its own rail. A tree reduces and sends back in
steps that grow with log2(m), at `TREE_BANDWIDTH_RATIO` times the rate of a ring: small messages take it. This is the
model by which NCCL chooses among its algorithms (NVIDIA/nccl, src/graph/tuning.cc).

[Note: causal attention] An attention has two products of each pair of a query and a key that act on each other, and its
backward five (Dao, arXiv:2307.08691). With neither a mask nor `is_causal` all pairs act. A mask is taken for the causal
one whose last query is that of the last key, as parts of a sequence have it under context parallelism.

[Note: groups] A grouped product, as experts have it, is as fast as the product of one group: the rows of all, which are
the largest size, divided by the number of groups.

[Note: fusion] Compiled code runs consecutive operators without products as one kernel, which reads what they have not
made themselves and writes what is read later.
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
"""Rate of a tree by that of a ring: it sends up and down, and short messages carry flags with their data."""


def find_group_ranks(group: str, rank: int, degrees: Degrees, size: int) -> list[int]:
    """Return the ranks of the group (axis, view, or else neighbours) of `size` ranks that `rank` is in."""
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
    """Return the time of one collective of a tensor of `size` bytes, once all ranks have come to it."""
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
    """Return the bytes that each device sends inside of its node and to other nodes, on a ring."""
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


VIEW_COST = 0.2  # Host time of an operator that issues no kernel, in operators
HOST_ONLY_PREFIXES = ("aten.empty", "aten.new_empty", "aten.lift_fresh", "prim.")
_GATHER_OPS = ("embedding", "index_select", "index.Tensor", "gather.default", "slice_scatter")


def is_kernel(operation: Operation) -> bool:
    """Return whether the device has work to do: the host alone makes views and empty tensors."""
    return bool(operation.writes) and not operation.name.startswith(HOST_ONLY_PREFIXES)


def estimate_kernel_seconds(operation: Operation, device: DeviceSpec, relative_speed: float = 1.0) -> float:
    """Return the time of an operator by itself; its arithmetic runs at `relative_speed` times the speed of the
    device."""
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
    # See [Note: groups].
    groups = next((shape[0] for shape in operation.shapes[2:] if len(shape) == 1), 1)
    return operation.flops / device.matmul_rate(known, min(*sizes, max(sizes) // groups) if sizes else 1)


def fuse_operations(operations: Sequence[Operation]) -> list[Operation]:
    """Return the operations that compiled code runs; see [Note: fusion]."""
    last = {block: place for place, each in enumerate(operations) for block, _ in (*each.reads, *each.writes)}
    found: list[Operation] = []
    chain: list[Operation] = []
    for place, each in enumerate(operations):
        if each.flops or each.collective_index is not None or each.name.startswith("fsdp."):
            found += [*_fuse_chain(chain, place, last), each]
            chain = []
        else:
            chain.append(each)
    return found + _fuse_chain(chain, len(operations), last)


def _fuse_chain(chain: Iterable[Operation], end: int, last: dict[int, int]) -> list[Operation]:
    """Join a chain that ends before the place `end` into one operation; none if it writes nothing that is read."""
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


MessageId: TypeAlias = tuple[int, int, int]  # Ranks from and to, and the number of the message between them


@dataclass(frozen=True)
class TimelineSpan:
    """One operator on a stream, from `start` to `end` [s]; `logged` and `phase` are those of the operation."""

    stream: str
    name: str
    start: float
    end: float
    log_length: int = 0
    phase: str = ""


@dataclass(frozen=True)
class Timeline:
    """A step of one rank: its seconds, and spans in the order in which they were issued."""

    rank: int
    seconds: float
    spans: tuple[TimelineSpan, ...]

    def busy_seconds(self, stream: str = COMPUTE) -> float:
        return sum(each.end - each.start for each in self.spans if each.stream == stream)


def simulate_timelines(
    traces: Sequence[StepTrace], degrees: Degrees, device: DeviceSpec, **options: Any
) -> list[Timeline]:
    """Play a step on ranks that exchange messages only with each other; `options` are those of `_Rank`."""
    sent: dict[MessageId, float] = {}
    ranks = [_RankSimulator(trace, degrees, device, sent, **options) for trace in traces]
    waiting = {rank.trace.rank: rank.run() for rank in ranks}
    while waiting:
        known = len(sent)
        done = [number for number, run in waiting.items() if all(message in sent for message in run)]
        for number in done:
            del waiting[number]
        if waiting and not done and len(sent) == known:
            raise MeshError(f"ranks {sorted(waiting)} wait for messages that none of the ranks that were traced sends.")
    return [Timeline(rank.trace.rank, rank.end, tuple(rank.spans)) for rank in ranks]


@dataclass
class _RankSimulator:
    trace: StepTrace
    degrees: Degrees
    device: DeviceSpec
    arrival_times: dict[MessageId, float]
    is_compiled: bool = False  # whether operators without products are fused
    chunked_groups: Collection[
        str
    ] = ()  # groups whose collectives pass parts, computing on one while others are passed
    waits_for_messages: bool = True  # False: messages are there when they are asked for
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
        self.relative_speed = self.device.straggler_speed(self.degrees.world_size)  # see [Note: the slowest]

    @property
    def end(self) -> float:
        return max(self.host_time, *self.stream_free_at.values())

    def run(self) -> Iterator[MessageId]:
        """Play all operators; yield each message that must have been sent before the next is asked for."""
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
        touched = [block for block, _ in (*operation.reads, *operation.writes)]
        after = 0.0
        if self.device.is_host:
            stream = COMPUTE
        elif operation.name.startswith("fsdp.all_gather_copy_in"):
            stream = GATHER
            after = self.copy_out_times[-2] if len(self.copy_out_times) > 1 else 0.0
        else:
            stream = REDUCE if all(of_stream.get(block) == REDUCE for block in touched) else COMPUTE
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
        """Put an operator on a stream, behind what it needs, and return its end."""
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
        """Return when `duration` seconds of computing are done that begin `now`; see [Note: hosts]."""
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
            beside = max(0.0, end - now) * speed
            if duration <= beside:
                return now + duration / speed
            duration -= beside
            now = max(now, end)
        return now + duration


def find_pipeline_ranks(rank: int, degrees: Degrees) -> list[int]:
    """Return the ranks of all stages that a rank exchanges messages with, itself included."""
    return find_group_ranks("pp", rank, degrees, degrees.pp)

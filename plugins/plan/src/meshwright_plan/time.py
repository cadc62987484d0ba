"""How long a step takes: its traced operators, played on the streams of a device.

[Note: streams] The host issues operators in order and runs ahead of the device. A device computes on one stream, and
the collectives of each group run in order on a stream of their own. An operator waits for the last one on another
stream that has written what it reads or writes. So communication is hidden behind what does not need it, as far as the
traced code allows.

[Note: waits of sharded data parallelism] FSDP also waits so as to hold little: a unit is gathered only when the unit
before the last has been copied out of its buffer, and gradients are packed only when those of the unit before have
been reduced. (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py: `wait_for_unshard`, `post_backward`.)

[Note: hosts] A device may be the host itself, as a CPU is: it has one computing stream, and issues nothing while it
computes. Collectives are still carried meanwhile, by threads of their own, but with the same cores; so it may compute
less, or nothing, while they run. Accelerators, too, may give a part of themselves to collectives.

[Note: the slowest] Devices of one kind differ in speed, and each step waits for all. So all compute as the slowest is
expected to, which of many is slower than of few.

[Note: pipelines] All stages are played together. A message leaves when it is made and arrives when the link has carried
it; whoever reads it waits. Bubbles follow from this.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from meshwright.plugin import Degrees, MeshError

from . import kernels, links
from .allocator import COMPUTE, GATHER, REDUCE, streams
from .device import Device
from .trace import Operation, Trace

Message: TypeAlias = tuple[int, int, int]
"""Ranks from and to, and the number of the message between them."""


@dataclass(frozen=True)
class Span:
    """One operator on a stream, from `start` to `end` [s]; `logged` and `phase` are those of the operation."""

    stream: str
    name: str
    start: float
    end: float
    logged: int = 0
    phase: str = ""


@dataclass(frozen=True)
class Timeline:
    """A step of one rank: its seconds, and spans in the order in which they were issued."""

    rank: int
    seconds: float
    spans: tuple[Span, ...]

    def busy(self, stream: str = COMPUTE) -> float:
        """Return the seconds in which a stream works."""
        return sum(each.end - each.start for each in self.spans if each.stream == stream)


def play(
    traces: Sequence[Trace],
    degrees: Degrees,
    device: Device,
    *,
    is_compiled: bool = False,
    chunked: Collection[str] = (),
    waits: bool = True,
) -> list[Timeline]:
    """Play a step on ranks that exchange messages only with each other.

    Args:
        traces: of one rank, or of one rank of each stage of a pipeline.
        is_compiled: whether operators without products are fused; see [Note: fusion] in `kernels`.
        chunked: groups whose collectives pass a part for each rank, where computing on the first part overlaps with
            passing the others, as in asynchronous tensor parallelism.
        waits: False: messages are there when they are asked for.

    Raises:
        MeshError: a rank waits for a message that no other sends.
    """
    sent: dict[Message, float] = {}
    ranks = [_Rank(trace, degrees, device, sent, is_compiled, chunked, waits) for trace in traces]
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
class _Rank:
    """One rank while it is played."""

    trace: Trace
    degrees: Degrees
    device: Device
    sent: dict[Message, float]
    is_compiled: bool
    chunked: Collection[str]
    waits: bool
    host: float = 0.0
    free: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    made: dict[int, tuple[str, float]] = field(default_factory=dict)
    coming: dict[int, Message] = field(default_factory=dict)
    copied_out: list[float] = field(default_factory=list)
    reduced: float = 0.0
    carried: list[tuple[float, float]] = field(default_factory=list)
    longest: float = 0.0
    numbers: dict[tuple[int, int], int] = field(default_factory=lambda: defaultdict(int))
    spans: list[Span] = field(default_factory=list)

    def __post_init__(self) -> None:
        # See [Note: the slowest].
        self.pace = self.device.pace(self.degrees.world_size)

    @property
    def end(self) -> float:
        return max(self.host, *self.free.values())

    def run(self) -> Iterator[Message]:
        """Play all operators; yield each message that must have been sent before the next is asked for."""
        operations = self.trace.operations
        of_stream = streams(operations)
        for each in kernels.fused(operations) if self.is_compiled else operations:
            for block, _ in (*each.reads, *each.writes):
                message = self.coming.get(block)
                if message is not None and each.call is None:
                    while message not in self.sent:
                        yield message
                    self.made[block] = ("message", self.sent[self.coming.pop(block)])
            if each.call is not None:
                self._communicate(each, of_stream)
            elif kernels.is_kernel(each):
                self._compute(each, of_stream)
            else:
                self.host += kernels.VIEW_COST * self.device.cpu_s

    def _compute(self, each: Operation, of_stream: dict[int, str]) -> None:
        touched = [block for block, _ in (*each.reads, *each.writes)]
        after = 0.0
        if self.device.is_host:
            stream = COMPUTE
        elif each.name.startswith("fsdp.all_gather_copy_in"):
            stream = GATHER
            after = self.copied_out[-2] if len(self.copied_out) > 1 else 0.0
        else:
            stream = REDUCE if all(of_stream.get(block) == REDUCE for block in touched) else COMPUTE
        if each.name.startswith("fsdp.chunk_cat") and not self.device.is_host:
            after = self.reduced
        end = self._put(stream, each, kernels.seconds(each, self.device, self.pace), after)
        if each.name.startswith("fsdp.split_with_sizes_copy"):
            self.copied_out.append(end)

    def _communicate(self, each: Operation, of_stream: dict[int, str]) -> None:
        call = self.trace.collectives[each.call or 0]
        ranks = links.members(call.group, self.trace.rank, self.degrees, call.ranks)
        if each.peer is not None:
            self._exchange(each, call.kind, ranks[each.peer], call.bytes)
            return
        took = links.seconds(call.kind, call.bytes, ranks, self.device.node)
        end = self._put(call.group, each, took)
        if call.group in self.chunked:
            self.made |= {block: (call.group, end - took * (1 - 1 / call.ranks)) for block, _ in each.writes}
        if any(of_stream.get(block) == REDUCE for block, _ in each.writes):
            self.reduced = end

    def _exchange(self, each: Operation, kind: str, peer: int, size: int) -> None:
        ends = (self.trace.rank, peer) if kind == "send" else (peer, self.trace.rank)
        message = (*ends, self.numbers[ends])
        self.numbers[ends] += 1
        if kind == "send":
            self.sent[message] = self._put(f"to {peer}", each, links.seconds(kind, size, ends, self.device.node))
        else:
            self.host += self.device.cpu_s
            if self.waits:
                self.coming |= {block: message for block, _ in each.writes}

    def _put(self, stream: str, each: Operation, took: float, after: float = 0.0) -> float:
        """Put an operator on a stream, behind what it needs, and return its end."""
        self.host += self.device.cpu_s
        known = [self.made[block] for block, _ in (*each.reads, *each.writes) if block in self.made]
        ready = max((time for other, time in known if other != stream), default=0.0)
        start = max(self.host, self.free[stream], ready, after)
        if each.call is None:
            end = self._computed(start, took)
            self.host = end if self.device.is_host else self.host
        else:
            end = start + took
            bisect.insort(self.carried, (start, end))
            self.longest = max(self.longest, took)
        self.free[stream] = end
        self.made |= {block: (stream, end) for block, _ in each.writes}
        self.spans.append(Span(stream, each.name, start, end, each.logged, each.phase))
        return end

    def _computed(self, now: float, left: float) -> float:
        """Return when `left` seconds of computing are done that begin `now`; see [Note: hosts]."""
        speed = self.device.speed_beside_communication
        if speed == 1 or not left:
            return now + left
        for start, end in self.carried[bisect.bisect(self.carried, (now - self.longest,)) :]:
            if left <= start - now:
                break
            left -= max(0.0, start - now)
            now = max(now, start)
            beside = max(0.0, end - now) * speed
            if left <= beside:
                return now + left / speed
            left -= beside
            now = max(now, end)
        return now + left


def stage_ranks(rank: int, degrees: Degrees) -> list[int]:
    """Return the ranks of all stages that a rank exchanges messages with, itself included."""
    return links.members("pp", rank, degrees, degrees.pp)

"""Measure how fast a device computes and how long collectives take, while all ranks do the same work.

Each time is that of the slowest rank, in the best of many short windows. So occasional other programs on the machine do
not count, but the load of the other ranks does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from meshwright.plugin import (
    MemoryMeter,
    OperationObserver,
    World,
    all_gather_single,
    make_event_recorder,
    reduce_scatter_single,
    use_run_timeout,
)

from ..timeline import VIEW_COST, is_kernel
from ..trace import Operation, memory_access
from .fit import CollectiveSample

MATMUL_SIZES = (64, 128, 256, 512, 1024, 2048, 4096)  # Smallest dimensions of the matrix products
MAX_CALL_S = 0.5  # Calls that take longer are not measured, and neither are larger ones of the same kind
COLLECTIVE_KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send")


@dataclass(frozen=True)
class MeasurementBudget:
    """Extent of the measurements."""

    window_seconds: float = 0.025  # duration of a window, in which a call is repeated
    num_windows: int = 12  # the best window counts
    num_passes: int = 3  # passes over all measurements, some time apart
    matmul_sizes: tuple[int, ...] = MATMUL_SIZES
    max_width: int = 16384
    attention_seq_len: int = 4096  # tokens of the measured attention
    stream_bytes: int = 1 << 28  # size of each tensor for memory bandwidth
    num_stream_tensors: int = 4  # tensors that take turns
    message_bytes: tuple[int, ...] = tuple(1 << power for power in range(10, 31, 2))  # sizes of collectives

    @classmethod
    def for_device(cls, device: torch.device) -> MeasurementBudget:
        """Return a budget of a few minutes. On a CPU, stream tensors exceed the caches, but reuse memory pages."""
        if device.type != "cpu":
            return cls()
        messages = tuple(1 << power for power in range(10, 27, 2))
        return cls(
            max_width=4096, attention_seq_len=1024, stream_bytes=1 << 22, num_stream_tensors=12, message_bytes=messages
        )


class CollectiveTimer:
    """Timer for work that all ranks do together."""

    def __init__(self, world: World, effort: MeasurementBudget) -> None:
        self._world, self._effort = world, effort

    def measure_seconds(self, call: Callable[[], object]) -> float | None:
        """Return the time of one call, None if it exceeds `MAX_CALL_S`. Collective; so may be `call`."""
        call()
        once = self._time_window(call, 1)
        if once > MAX_CALL_S:
            return None
        count = max(1, round(self._effort.window_seconds / once))
        windows = max(2, round(self._effort.num_windows * min(1.0, self._effort.window_seconds / once)))
        return min(self._time_window(call, count) for _ in range(windows)) / count

    def _time_window(self, call: Callable[[], object], count: int) -> float:
        """Return the time that the slowest rank takes for `count` calls."""
        self.synchronize()
        self._world.reduce_sum_and_max([0], [])
        begin = time.perf_counter()
        for _ in range(count):
            call()
        self.synchronize()
        return self.max_over_ranks(time.perf_counter() - begin)

    def max_over_ranks(self, seconds: float) -> float:
        return max(1, self._world.reduce_sum_and_max([], [round(seconds * 1e9)])[1][0]) / 1e9

    def synchronize(self) -> None:
        if self._world.device.type != "cpu":
            torch.accelerator.synchronize()


def measure_matmuls(
    clock: CollectiveTimer, dtype: torch.dtype, device: torch.device, effort: MeasurementBudget
) -> dict[int, float]:
    """Return FLOP/s of a linear layer's three matrix products, by smallest dimension, as far as `MAX_CALL_S` allows."""
    rates: dict[int, float] = {}
    for size in effort.matmul_sizes:
        seconds_per_flop = []
        for wide in sorted({size, min(4 * size, max(effort.max_width, size))}):
            for work in _linear_matmuls(size, wide, dtype, device):
                seconds = clock.measure_seconds(work)
                if seconds is None:
                    return rates
                seconds_per_flop.append(seconds / (2 * size * wide * wide))
        rates[size] = len(seconds_per_flop) / sum(seconds_per_flop)
    return rates


def _linear_matmuls(size: int, wide: int, dtype: torch.dtype, device: torch.device) -> Iterator[Callable[[], Tensor]]:
    def filled(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    tokens_in, weight = filled(wide, size), filled(wide, size)
    yield lambda: tokens_in @ weight.T
    grad, weight_in = filled(size, wide), filled(wide, wide)
    yield lambda: grad @ weight_in
    grad_out, tokens = filled(wide, size), filled(wide, wide)
    yield lambda: grad_out.T @ tokens


def measure_attention(
    clock: CollectiveTimer, dtype: torch.dtype, device: torch.device, effort: MeasurementBudget
) -> tuple[float, float]:
    """Return FLOP/s of causal attention, forward and backward; see [Note: causal attention] in `timeline`."""
    heads, width = 8, 64 if device.type == "cpu" else 128
    shape = (1, heads, effort.attention_seq_len, width)
    inputs = [torch.randn(shape, device=device).to(dtype).requires_grad_() for _ in range(3)]
    flops = 2 * heads * effort.attention_seq_len * effort.attention_seq_len * 2 * width / 2

    def attended() -> Tensor:
        return F.scaled_dot_product_attention(inputs[0], inputs[1], inputs[2], is_causal=True)

    output = attended()
    grad = torch.randn_like(output)
    forward = clock.measure_seconds(attended)
    backward = clock.measure_seconds(lambda: torch.autograd.grad(output, inputs, grad, retain_graph=True))
    return flops / (forward or 1.0), 2.5 * flops / (backward or 1.0)


_MEMORY_BOUND_OPS: Mapping[str, tuple[int, Callable[[Tensor, Tensor, Tensor], object]]] = {
    "copy": (2, lambda a, b, c: a.copy_(b)),
    "add": (3, lambda a, b, c: a + b),
    "mul": (3, lambda a, b, c: a * b),
    "silu": (2, lambda a, b, c: F.silu(a)),
    "softmax": (2, lambda a, b, c: torch.softmax(a, -1)),
    "mean of squares": (3, lambda a, b, c: a.pow(2).mean(-1, keepdim=True)),
    "cat": (4, lambda a, b, c: torch.cat([a, b], -1)),
    "lerp in place": (3, lambda a, b, c: a.lerp_(b, 1e-3)),
    "addcmul in place": (4, lambda a, b, c: a.addcmul_(b, c, value=1e-3)),
    "sqrt": (2, lambda a, b, c: a.sqrt()),
}
"""Operators of blocks and optimizers without matrix products, and how many tensors each reads and writes. Some allocate
their result, some work in place, some compute more than a sum."""


def measure_memory_bandwidth(
    clock: CollectiveTimer, device: torch.device, effort: MeasurementBudget
) -> dict[str, float]:
    """Return the bytes per second that each operator of `_MEMORY_BOUND_OPS` reads and writes."""
    columns = 1024
    shape = (max(1, effort.stream_bytes // 4 // columns), columns)
    tensors = [torch.rand(shape, device=device) for _ in range(max(3, effort.num_stream_tensors))]
    size = tensors[0].numel() * 4
    turn = 0

    def others() -> list[Tensor]:
        nonlocal turn
        turn += 1
        return [tensors[(turn * 3 + offset) % len(tensors)] for offset in range(3)]

    rates = {}
    for name, (passes, work) in _MEMORY_BOUND_OPS.items():
        seconds = clock.measure_seconds(lambda work=work: work(*others()))  # type: ignore[misc]
        rates[name] = passes * size / (seconds or 1.0)
    return rates


def measure_min_kernel(clock: CollectiveTimer, device: torch.device) -> float:
    """Return the seconds of a kernel on eight elements, queued behind long kernels so that none waits for the host."""
    few = torch.zeros(8, device=device)
    moment = make_event_recorder(device)
    if moment is None:
        return clock.measure_seconds(lambda: few.neg_()) or 1e-9
    many, best = 200, float("inf")
    wide = torch.randn(8192, 8192, device=device)
    for _ in range(5):
        for _ in range(4):
            wide @ wide
        begin = moment()
        for _ in range(many):
            few.neg_()
        end = moment()
        clock.synchronize()
        best = min(best, begin.elapsed_time(end) / 1e3 / many)
    return clock.max_over_ranks(best)


class _TransformerBlock(nn.Module):
    """The per-token operators of a transformer block, at a size that takes almost no time."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, hidden: Tensor) -> Tensor:
        normed = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale
        halves = torch.cat((-normed[..., 4:], normed[..., :4]), dim=-1)
        turned = halves.view(-1, 2, 4).transpose(1, 2).reshape(-1, 8)
        out: Tensor = hidden + self.down(F.silu(self.gate(turned)) * self.up(turned))
        return out


class _KernelCounter(OperationObserver):
    """Count operators that launch kernels, and the others, such as views."""

    def __init__(self) -> None:
        super().__init__()
        self.meter = MemoryMeter()
        self.num_kernels, self.num_views = 0, 0

    def observe(self, operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        self.meter.observe(operation, args, kwargs, result)
        reads, writes = memory_access(self.meter, operation, args, kwargs, result)
        is_one = is_kernel(Operation(str(operation), 0, 0, (), None, None, reads, writes))
        self.num_kernels += is_one
        self.num_views += not is_one


def measure_launch_overhead(clock: CollectiveTimer, device: torch.device, kernel_s: float) -> float:
    """Return the seconds that the host takes to issue one operator. On a CPU, `kernel_s` per kernel is subtracted."""
    block = nn.Sequential(*(_TransformerBlock() for _ in range(4))).to(device)
    hidden = torch.randn(4, 8, device=device, requires_grad=True)

    def step() -> None:
        block(hidden).sum().backward()

    step()
    counts = _KernelCounter()
    with counts:
        step()
    best = float("inf")
    for _ in range(20):
        clock.synchronize()
        begin = time.perf_counter()
        step()
        best = min(best, time.perf_counter() - begin)
    computing = counts.num_kernels * kernel_s if device.type == "cpu" else 0.0
    return clock.max_over_ranks(max(best - computing, best / 10) / (counts.num_kernels + VIEW_COST * counts.num_views))


def measure_overlap_speed(clock: CollectiveTimer, device: torch.device, effort: MeasurementBudget) -> float:
    """Return the fraction of its full speed at which the device computes while all ranks run a collective."""
    message = torch.zeros(max(effort.message_bytes) // 8 // 4, device=device)
    width = 512 if device.type == "cpu" else 4096
    square = torch.randn(width, width, device=device)

    def carry(products: int = 0) -> None:
        works = [dist.all_reduce(message, async_op=True) for _ in range(4)]
        for _ in range(products):
            square @ square
        for work in works:
            if work is not None:
                work.wait()

    carried = clock.measure_seconds(carry) or 1.0
    product = clock.measure_seconds(lambda: square @ square) or 1.0
    count = max(1, round(2 * carried / product))
    together = clock.measure_seconds(lambda: carry(count)) or 1.0
    return min(1.0, max(0.0, 1 - (together - count * product) / carried))


# -- collectives


def measure_collectives(
    world: World, clock: CollectiveTimer, effort: MeasurementBudget, ranks_of_node: int
) -> list[CollectiveSample]:
    """Measure collectives of all ranks, nodes, and pairs, and across nodes; disjoint groups at once. Collective."""
    sizes = {world.size, ranks_of_node, 2} if world.size % 2 == 0 else {world.size, ranks_of_node}
    meshes = [(size, False) for size in sorted(sizes) if size > 1 and world.size % size == 0]
    if 1 < ranks_of_node < world.size:
        meshes.append((world.size // ranks_of_node, True))
    samples: list[CollectiveSample] = []
    for size, is_across in meshes:
        others = world.size // size  # groups are adjacent ranks, or ranks with the same local rank in each node
        with use_run_timeout():
            mesh = init_device_mesh(world.device.type, (size, others) if is_across else (others, size))
        group = mesh.get_group(0 if is_across else 1)
        members = tuple(dist.get_process_group_ranks(group))
        for kind in COLLECTIVE_KINDS:
            # Messages go from the first rank of a pair to the second; a larger group would add no information.
            if kind != "send" or len(members) == 2:
                samples += _measure_kind(kind, group, members, world, clock, effort)
    return samples


def _measure_kind(
    kind: str,
    group: dist.ProcessGroup,
    members: tuple[int, ...],
    world: World,
    clock: CollectiveTimer,
    effort: MeasurementBudget,
) -> Iterator[CollectiveSample]:
    """Measure one kind of collective for all sizes, as far as `MAX_CALL_S` allows."""
    for size in effort.message_bytes:
        count = -(-size // (4 * len(members))) * len(members)
        full, output = torch.zeros(count, device=world.device), torch.zeros(count, device=world.device)
        shard = torch.zeros(count // len(members), device=world.device)
        seconds = clock.measure_seconds(_make_collective_call(kind, group, full, output, shard))
        if seconds is None:
            return
        yield CollectiveSample(kind, 4 * count, members, seconds)


def _make_collective_call(
    kind: str, group: dist.ProcessGroup, full: Tensor, output: Tensor, shard: Tensor
) -> Callable[[], object]:
    works: dict[str, Callable[[], object]] = {
        "all_gather": lambda: all_gather_single(full, shard, group=group),
        "reduce_scatter": lambda: reduce_scatter_single(shard, full, group=group),
        "all_reduce": lambda: dist.all_reduce(full, group=group),
        "all_to_all": lambda: dist.all_to_all_single(output, full, group=group),
        "broadcast": lambda: dist.broadcast(full, group=group, group_src=0),
        "send": lambda: dist.send(full, group=group, group_dst=1),
    }
    if kind == "send" and dist.get_rank(group) > 0:
        return lambda: dist.recv(full, group=group, group_src=0)
    return works[kind]

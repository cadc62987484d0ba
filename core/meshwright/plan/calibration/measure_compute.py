"""How fast this rank's device computes while all ranks do the same: products, attention, streams, single operators.

All times are those of the slowest rank, in the best of many short windows: others that use the machine now and then are
left out, and peers, which compute all the time, are not.
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

from ...mesh.world import World
from ...tensors.ops import moments_of
from ...testing.meter import Meter
from ...testing.observe import Observer
from ..kernels import VIEW_COST, is_kernel
from ..touched import touched
from ..trace import Operation

CLASSES = (64, 128, 256, 512, 1024, 2048, 4096)
"""Of the smallest size of a product."""
PATIENCE_S = 0.5
"""What takes longer is not measured, nor is the same in larger."""


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    Attributes:
        window_s: for how long work is repeated at least.
        windows: of which the best counts; of work that takes longer than a window, fewer.
        passes: over all that is measured, some time apart.
        classes: of products, by the smallest of their sizes.
        widest: the other sizes are four times the smallest, but no more than this.
        length: tokens of an attention.
        stream_bytes: of a tensor that is streamed.
        streams: how many such tensors take their turns.
        messages: bytes of collectives.
    """

    window_s: float = 0.025
    windows: int = 12
    passes: int = 3
    classes: tuple[int, ...] = CLASSES
    widest: int = 16384
    length: int = 4096
    stream_bytes: int = 1 << 28
    streams: int = 4
    messages: tuple[int, ...] = tuple(1 << power for power in range(10, 31, 2))

    @classmethod
    def of(cls, device: torch.device) -> Effort:
        """What takes some minutes. A CPU's memory is streamed by tensors such as a step has: each page of larger ones
        is made anew, and smaller ones stay in a core's own cache."""
        if device.type != "cpu":
            return cls()
        messages = tuple(1 << power for power in range(10, 27, 2))
        return cls(widest=4096, length=1024, stream_bytes=1 << 22, streams=12, messages=messages)


class Clock:
    """Times work that all ranks do together.

    Args:
        world: the ranks.
    """

    def __init__(self, world: World, effort: Effort) -> None:
        self._world, self._effort = world, effort

    def seconds(self, work: Callable[[], object]) -> float | None:
        """Of one call. Collective; `work` may be a collective, too.

        Returns:
            None: it takes longer than `PATIENCE_S`.
        """
        work()
        once = self.window(work, 1)
        if once > PATIENCE_S:
            return None
        count = max(1, round(self._effort.window_s / once))
        windows = max(2, round(self._effort.windows * min(1.0, self._effort.window_s / once)))
        return min(self.window(work, count) for _ in range(windows)) / count

    def window(self, work: Callable[[], object], count: int) -> float:
        """Seconds in which the slowest rank calls it so many times."""
        self.wait()
        self._world.exchange([0], [])
        begin = time.perf_counter()
        for _ in range(count):
            work()
        self.wait()
        return self.slowest(time.perf_counter() - begin)

    def slowest(self, seconds: float) -> float:
        """The most that a rank has measured, so that all go on with the same."""
        return max(1, self._world.exchange([], [round(seconds * 1e9)])[1][0]) / 1e9

    def wait(self) -> None:
        """Until the device has done what it was given."""
        if self._world.device.type != "cpu":
            torch.accelerator.synchronize()


def products(clock: Clock, dtype: torch.dtype, device: torch.device, effort: Effort) -> dict[int, float]:
    """Operations a second of matrix products by class, as far as they are done within a while.

    Each class is what a linear layer does: its forward, the gradient of its input and that of its weight, each with
    another size as the smallest; with all sizes alike, and with the others four times as large.
    """
    found: dict[int, float] = {}
    for size in effort.classes:
        paces = []
        for wide in sorted({size, min(4 * size, max(effort.widest, size))}):
            for work in _linear(size, wide, dtype, device):
                seconds = clock.seconds(work)
                if seconds is None:
                    return found
                paces.append(seconds / (2 * size * wide * wide))
        found[size] = len(paces) / sum(paces)
    return found


def _linear(size: int, wide: int, dtype: torch.dtype, device: torch.device) -> Iterator[Callable[[], Tensor]]:
    def filled(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    tokens_in, weight = filled(wide, size), filled(wide, size)
    yield lambda: tokens_in @ weight.T
    grad, weight_in = filled(size, wide), filled(wide, wide)
    yield lambda: grad @ weight_in
    grad_out, tokens = filled(wide, size), filled(wide, wide)
    yield lambda: grad_out.T @ tokens


def attention(clock: Clock, dtype: torch.dtype, device: torch.device, effort: Effort) -> tuple[float, float]:
    """Operations a second of causal attention, forward and backward; see [Note: causal attention] in `kernels`."""
    heads, width = 8, 64 if device.type == "cpu" else 128
    shape = (1, heads, effort.length, width)
    inputs = [torch.randn(shape, device=device).to(dtype).requires_grad_() for _ in range(3)]
    flops = 2 * heads * effort.length * effort.length * 2 * width / 2

    def attended() -> Tensor:
        return F.scaled_dot_product_attention(inputs[0], inputs[1], inputs[2], is_causal=True)

    made = attended()
    grad = torch.randn_like(made)
    forward = clock.seconds(attended)
    backward = clock.seconds(lambda: torch.autograd.grad(made, inputs, grad, retain_graph=True))
    return flops / (forward or 1.0), 2.5 * flops / (backward or 1.0)


def streams(clock: Clock, device: torch.device, effort: Effort) -> dict[str, float]:
    """Bytes a second that operators without products read and write, by their names.

    They are those of blocks and of optimizers: some make new tensors, some change theirs, some compute more than a sum.
    """
    columns = 1024
    shape = (max(1, effort.stream_bytes // 4 // columns), columns)
    tensors = [torch.rand(shape, device=device) for _ in range(max(3, effort.streams))]
    size = tensors[0].numel() * 4
    turn = 0

    def others() -> list[Tensor]:
        nonlocal turn
        turn += 1
        return [tensors[(turn * 3 + place) % len(tensors)] for place in range(3)]

    works: Mapping[str, tuple[int, Callable[[Tensor, Tensor, Tensor], object]]] = {
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
    found = {}
    for name, (passes, work) in works.items():
        seconds = clock.seconds(lambda work=work: work(*others()))  # type: ignore[misc]
        found[name] = passes * size / (seconds or 1.0)
    return found


def least_kernel(clock: Clock, device: torch.device) -> float:
    """Seconds that the least of kernels takes on the device: a few elements are changed.

    An accelerator gets them behind something long, so that it never waits for the host.
    """
    few = torch.zeros(8, device=device)
    moment = moments_of(device)
    if moment is None:
        return clock.seconds(lambda: few.neg_()) or 1e-9
    many, best = 200, float("inf")
    wide = torch.randn(8192, 8192, device=device)
    for _ in range(5):
        for _ in range(4):
            wide @ wide
        begin = moment()
        for _ in range(many):
            few.neg_()
        end = moment()
        clock.wait()
        best = min(best, begin.elapsed_time(end) / 1e3 / many)
    return clock.slowest(best)


class _Block(nn.Module):
    """What a transformer does for a token, at a size that takes no time."""

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


class _Counts(Observer):
    """How many operators are kernels, and how many are views."""

    def __init__(self) -> None:
        super().__init__()
        self.meter = Meter()
        self.kernels, self.views = 0, 0

    def observe(self, operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        self.meter.observe(operation, args, kwargs, result)
        reads, writes = touched(self.meter, operation, args, kwargs, result)
        made = Operation(str(operation), 0, 0, (), None, None, reads, writes)
        self.kernels += is_kernel(made)
        self.views += not is_kernel(made)


def issuing(clock: Clock, device: torch.device, kernel_s: float) -> float:
    """Seconds in which the host issues one operator of a model, forward or backward.

    Args:
        kernel_s: what it takes besides where the device is the host.
    """
    block = nn.Sequential(*(_Block() for _ in range(4))).to(device)
    hidden = torch.randn(4, 8, device=device, requires_grad=True)

    def step() -> None:
        block(hidden).sum().backward()

    step()
    counts = _Counts()
    with counts:
        step()
    best = float("inf")
    for _ in range(20):
        clock.wait()
        begin = time.perf_counter()
        step()
        best = min(best, time.perf_counter() - begin)
    computing = counts.kernels * kernel_s if device.type == "cpu" else 0.0
    return clock.slowest(max(best - computing, best / 10) / (counts.kernels + VIEW_COST * counts.views))


def beside(clock: Clock, device: torch.device, effort: Effort) -> float:
    """The part of its speed at which the device computes while a collective of all ranks runs.

    Computing that takes about twice as long as some all-reduces begins with them, and ends later by what they take.
    """
    message = torch.zeros(max(effort.messages) // 8 // 4, device=device)
    width = 512 if device.type == "cpu" else 4096
    square = torch.randn(width, width, device=device)

    def carry() -> None:
        for work in [dist.all_reduce(message, async_op=True) for _ in range(4)]:
            if work is not None:
                work.wait()

    carried = clock.seconds(carry) or 1.0
    product = clock.seconds(lambda: square @ square) or 1.0
    count = max(1, round(2 * carried / product))

    def both() -> None:
        works = [dist.all_reduce(message, async_op=True) for _ in range(4)]
        for _ in range(count):
            square @ square
        for work in works:
            if work is not None:
                work.wait()

    together = clock.seconds(both) or 1.0
    return min(1.0, max(0.0, 1 - (together - count * product) / carried))

"""Measure how much memory a piece of code holds on this rank, by its tensors, or set a limit to it.

Storages are counted, each once and by its present size, whichever tensors look at it; so views cost nothing, padding
counts, and memory that FSDP frees by resizing a storage to 0 is free. Workspace inside of an operation, the
allocator's rounding and caches, and the buffers of the communication backend are not counted.

torch.distributed has a memory tracker that splits further, but it is private, and replaces methods of torch while it
runs; see `meter` for how sizes are known here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..mesh.gloo_threads import settle
from ..tensors.ops import tensors_in
from .meter import Meter, storage_of


@dataclass(frozen=True)
class Held:
    """Bytes on this rank.

    Attributes:
        parameters: of the modules; of sharded ones, this rank's shards.
        gradients: what is in the `.grad` of these parameters.
        optimizer: state of the optimizer.
        other: the rest: activations, gathered parameters, gradients on their way, batches, buffers.
    """

    parameters: int
    gradients: int
    optimizer: int
    other: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.other


@dataclass(frozen=True)
class Memory:
    """What was held when it was most, and what is still held afterwards."""

    peak: Held
    after: Held


def measure_memory(
    work: Callable[[], object], modules: Sequence[nn.Module], optimizer: Optimizer | None = None
) -> Memory:
    """Run `work` and measure the memory of all tensors that it makes or touches, backward included.

    Args:
        work: usually one training step.
        modules: whose parameters, gradients and buffers count from the start.
        optimizer: whose state counts from the start.
    """
    mode = _Meter(modules, optimizer)
    with mode:
        work()
    mode.update_peak()
    return Memory(mode.peak, mode.now())


@contextmanager
def limit_memory(size: int) -> Iterator[None]:
    """Within, this process may have so many bytes more of its own than now, or allocating them fails. Linux only.

    Memory that was freed but is kept by the allocator comes on top of them: below 64 MiB, as a rule.
    """
    import resource

    status = Path("/proc/self/status").read_text(encoding="utf-8")
    (own_kib,) = (int(line.split()[1]) for line in status.splitlines() if line.startswith("VmData:"))
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (own_kib * 1024 + size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


class _Meter(Meter):
    def __init__(self, modules: Sequence[nn.Module], optimizer: Optimizer | None) -> None:
        super().__init__()
        self._held = list(dict.fromkeys(p for module in modules for p in module.parameters()))
        self._optimizer = optimizer
        self.see([*self._held, *(b for module in modules for b in module.buffers())])
        self.peak = self.now()

    def observe(self, operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        super().observe(operation, args, kwargs, result)
        self.update_peak()

    def update_peak(self) -> None:
        if self.total > self.peak.total:
            settle()
        # Of equal moments the last: a gradient is in its place only after the operation that makes it.
        if self.total >= self.peak.total:
            self.peak = self.now()

    def now(self) -> Held:
        """What is held now."""
        self.see([*self._gradients(), *self._state()])
        seen: set[int] = set()

        def held(tensors: Iterable[Tensor]) -> int:
            # A storage that several kinds share belongs to the first of them.
            found = {id(storage): storage for storage in map(storage_of, tensors) if id(storage) not in seen}
            seen.update(found)
            return sum(storage.nbytes() for storage in found.values())

        parameters, gradients, state = held(self._held), held(self._gradients()), held(self._state())
        return Held(parameters, gradients, state, self.total - parameters - gradients - state)

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self._held if p.grad is not None]

    def _state(self) -> list[Tensor]:
        return [] if self._optimizer is None else list(tensors_in([*self._optimizer.state.values()]))

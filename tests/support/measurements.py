"""Measure a piece of code on this rank: memory of its tensors, operations that it computes, reads of values."""

from __future__ import annotations

import resource
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from meshwright.mesh.world import wait_for_gloo_threads
from meshwright.tensors.ops import list_tensors
from meshwright.tracing.observers import MemoryMeter, OperationObserver, get_storage


class OperationCounter(OperationObserver):
    """Count the operations that are computed, by name, such as "aten.mm.default"."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def observe(self, operation: Any, args: Any, kwargs: Any, result: Any) -> None:
        self.counts[str(operation)] += 1


# -- memory


@dataclass(frozen=True)
class RankMemory:
    """Bytes on this rank."""

    parameters: int  # Of the modules; of sharded ones, this rank's shards
    gradients: int  # In the `.grad` of these parameters
    optimizer: int  # State of the optimizer
    other: int  # Activations, gathered parameters, gradients being reduced, batches, buffers

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.other


@dataclass(frozen=True)
class MemoryMeasurement:
    """What was held at the peak, and what is still held afterwards."""

    peak: RankMemory
    after: RankMemory


def measure_memory(
    work: Callable[[], object], modules: Sequence[nn.Module], optimizer: Optimizer | None = None
) -> MemoryMeasurement:
    """Run `work` and measure the memory of all tensors that it makes or touches, backward included.

    Views cost nothing, padding counts, and memory that FSDP frees by resizing a storage to 0 is free. Workspace inside
    an operation, the allocator's rounding and caches, and buffers of the communication backend are not counted.
    Parameters, gradients and buffers of the modules and the state of the optimizer count from the start.
    """
    mode = _MemoryMeter(modules, optimizer)
    with mode:
        work()
    mode.update_peak()
    return MemoryMeasurement(mode.peak, mode.measure_now())


@contextmanager
def limit_memory(size: int) -> Iterator[None]:
    """Let this process allocate at most so many further bytes of its own. Linux only.

    Memory that was freed but is kept by the allocator comes on top of them: below 64 MiB, as a rule.
    """
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    (own_kib,) = (int(line.split()[1]) for line in status.splitlines() if line.startswith("VmData:"))
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (own_kib * 1024 + size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


class _MemoryMeter(MemoryMeter):
    def __init__(self, modules: Sequence[nn.Module], optimizer: Optimizer | None) -> None:
        super().__init__()
        self._parameters = list(dict.fromkeys(p for module in modules for p in module.parameters()))
        self._optimizer = optimizer
        self.track([*self._parameters, *(b for module in modules for b in module.buffers())])
        self.peak = self.measure_now()

    def observe(self, operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        super().observe(operation, args, kwargs, result)
        self.update_peak()

    def update_peak(self) -> None:
        if self.total_bytes > self.peak.total:
            wait_for_gloo_threads()
        # Of equal moments the last: a gradient is in its place only after the operation that makes it.
        if self.total_bytes >= self.peak.total:
            self.peak = self.measure_now()

    def measure_now(self) -> RankMemory:
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        state = [] if self._optimizer is None else list(list_tensors([*self._optimizer.state.values()]))
        self.track([*gradients, *state])
        seen: set[int] = set()

        def held(tensors: Iterable[Tensor]) -> int:
            # A storage that several kinds share belongs to the first of them.
            found = {id(storage): storage for storage in map(get_storage, tensors) if id(storage) not in seen}
            seen.update(found)
            return sum(storage.nbytes() for storage in found.values())

        sizes = [held(self._parameters), held(gradients), held(state)]
        return RankMemory(*sizes, self.total_bytes - sum(sizes))


# -- reads of values

_READING_OPERATORS = frozenset(
    {"_local_scalar_dense", "nonzero", "masked_select", "bincount", "equal", "_unique2", "unique_dim", "on_host"}
)  # Operators that give the host a value, or make a tensor whose size depends on values
_COPYING_CALLS = (Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.cpu)
"""Copies to the host that are no operator where the tensor is there already; not seen in hooks of backward."""
_REPORTED_PATHS = ("meshwright", "transformers", "torch/optim", "megatron_fsdp")
_SKIPPED_PATHS = ("/tracing/observers.py", "/meshwright_testing/zoo/", "/tests/", "/model/recompute.py")
"""Modes and wrappers that operators come through."""


def count_reads(work: Callable[[], object]) -> Counter[str]:
    """Run `work` and count the reads of values, those of backward included, for which an accelerator would wait.

    Reads of what is never on an accelerator (batches in host memory, messages of the control plane, step counters of
    optimizers) look alike; tell them apart by their place: the innermost file of ours, of transformers or of torch's
    optimizers, such as "manager/ending.py" or "transformers/masking_utils.py"; "" for others.
    """
    operators = _ReadOperatorCounter()
    calls = _ReadCallCounter(operators)
    with calls, operators:
        work()
    return operators.counts + calls.counts


class _ReadOperatorCounter(OperationObserver):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.on_host: list[Tensor] = []  # Copies that have been counted

    def observe(self, operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        name = operation.overloadpacket.__name__
        chooses = name in ("index", "index_put", "index_put_") and any(
            each.dtype in (torch.bool, torch.uint8) for each in list_tensors(args[1])
        )
        counts = name == "repeat_interleave" and kwargs.get("output_size") is None
        if name == "on_host":
            self.on_host.append(result)
        if name in _READING_OPERATORS or chooses or counts:
            self.counts[_find_calling_file()] += 1


class _ReadCallCounter(TorchFunctionMode):
    def __init__(self, operators: _ReadOperatorCounter) -> None:
        super().__init__()
        self._operators = operators
        self.counts: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _COPYING_CALLS and not any(args[0] is each for each in self._operators.on_host):
            self.counts[_find_calling_file()] += 1
        return func(*args, **(kwargs or {}))


def _find_calling_file() -> str:
    for frame in reversed(traceback.extract_stack()):
        file = frame.filename.replace("\\", "/")
        if any(f"/{each}" in file for each in _REPORTED_PATHS) and not any(each in file for each in _SKIPPED_PATHS):
            package, _, rest = file.rpartition("/")
            return f"{package.rpartition('/')[2]}/{rest}"
    return ""

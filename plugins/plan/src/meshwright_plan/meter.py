"""What holds memory at the peak of a step, and which operator makes the peak.

[Note: owners] A block belongs to the first of these that holds:
    parameters      of the model on this rank, its shards
    gradients       what is in `.grad` when the backward of a step has ended
    optimizer       state of the optimizer
    gathered        memory that was resized while the meter ran, as FSDP does for what it gathers
    communication   what a collective reads or writes, and was made for that: by a collective, or empty
    activations     made in a forward
    temporary       made in a backward (recomputed activations included), or by the optimizer
    other           made before: buffers, batches

Memory that no operator has made is not counted in a step, such as buffers that gloo copies results from. All changes of
sizes in a step are logged, so owners at the peak are determined afterwards, when the use of each block is known.
"""

from __future__ import annotations

import weakref
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshwright.plugin import (
    COLLECTIVE_NAMESPACES,
    MemoryMeter,
    OperationObserver,
    StorageRecord,
    UncompiledMode,
    get_operation_name,
    get_storage,
    is_on_meta,
    list_tensors,
    wait_for_gloo_threads,
)

from ._compat import is_in_backward

OWNERS = ("parameters", "gradients", "optimizer", "gathered", "activations", "communication", "temporary", "other")
LIBRARIES = "libraries"  # Owner of workspaces of libraries in a plan, which operators do not show
MIN_BLOCK_SIZE = 512  # Multiple of bytes in which CUDA's allocator counts memory
_LIFT_FRESH = "aten.lift_fresh"
_NEW_EMPTY = torch.ops.aten.new_empty.default
_EMPTY_FACTORIES = ("aten.empty", "aten.new_empty", "aten.zeros", "aten.new_zeros")


@dataclass(frozen=True)
class MemorySnapshot:
    """Bytes of a rank at one moment; for a peak also those of activations by module, and the most in each phase."""

    bytes: int
    owners: Mapping[str, int]
    operator: str
    activations: Mapping[str, int] = field(default_factory=dict)
    phases: Mapping[str, int] = field(default_factory=dict)


class StepMeter(MemoryMeter, UncompiledMode):
    """Log what happens to memory in a step; nothing is compiled meanwhile. `is_real`: collectives run."""

    def __init__(self, *, is_real: bool = False) -> None:
        super().__init__(round_to=MIN_BLOCK_SIZE)
        self._is_real = is_real
        self.phase, self.module = "other", ""
        self.after: OperationObserver | None = (
            None  # observer of each operation once its memory is logged: one mode for both
        )
        self._made: dict[int, str] = {}
        self._forwards: dict[int, str] = {}
        self._owned: dict[int, str] = {}
        self._empty: set[int] = set()
        self._foreign: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._blocks, self._changes = array("q"), array("q")
        self.peak, self._peak_at, self._operator = 0, 0, ""
        self.peaks: dict[str, int] = {}  # the most bytes in each `step_phase`

    @property
    def log(self) -> Iterator[tuple[int, int]]:
        return zip(self._blocks, self._changes, strict=True)

    @property
    def logged(self) -> int:
        return len(self._blocks)

    @property
    def step_phase(self) -> str:
        if self.phase == "activations":
            return "backward" if is_in_backward() else "forward"
        return "optimizer"

    def begin(self) -> None:
        """Begin a step: forget what happened before."""
        self._blocks = array("q", (block.number for block in self.live.values()))
        self._changes = array("q", (block.size for block in self.live.values()))
        self.peak, self._peak_at, self._operator = self.total, len(self._blocks), ""
        self.peaks = {}
        alive = set(self._blocks)
        self._made = {number: owner for number, owner in self._made.items() if number in alive}
        self._forwards = {number: module for number, module in self._forwards.items() if number in alive}
        self._empty &= alive

    def own(self, tensors: Iterable[Tensor], owner: str) -> None:
        tensors = list(tensors)
        self.see(tensors)
        for tensor in tensors:
            block = self.live.get(id(get_storage(tensor)))
            if block is not None:
                self._owned.setdefault(block.number, owner)

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.dispatched(func, types, args, kwargs)

    def observe(self, operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        # Empty tensors, of which there may be one for each rank, are left out.
        if operation is not _NEW_EMPTY or result.numel():
            self._write_down(operation, args, kwargs, result)
        if self.after is not None:
            self.after.observe(operation, args, kwargs, result)

    def _write_down(self, operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        before, name, given = len(self._blocks), get_operation_name(operation), list(list_tensors((args, kwargs)))
        if self.phase != "other" and not name.startswith(_LIFT_FRESH):
            self._note_foreign(given)
        self.see(given if operation.is_view else [*given, *list_tensors(result)])  # as in `Meter.observe`
        if name.startswith(_EMPTY_FACTORIES):
            self._empty.update(self._blocks[before:])
        elif operation.namespace in COLLECTIVE_NAMESPACES:
            makes_anew = operation.namespace != "c10d" and not operation.overloadpacket.__name__.endswith("_")
            self._empty.update(self._blocks[before:])
            self._note_messages(result if makes_anew else (), always=True)
            self._note_messages((args, kwargs), always=False)
        phase = self.step_phase
        if self._is_real and self.total > self.peaks.get(phase, 0):
            wait_for_gloo_threads()
        self.peaks[phase] = max(self.total, self.peaks.get(phase, 0))
        # Of equal moments the last, as in `testing.memory`.
        if self.total >= self.peak and operation.namespace != "profiler":
            self.peak, self._peak_at, self._operator = self.total, len(self._blocks), name

    def take_up(self, storage: torch.UntypedStorage) -> None:
        if id(storage) not in self._foreign:
            super().take_up(storage)

    def _note_foreign(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if tensor.layout is torch.strided and not is_on_meta(tensor):
                storage = get_storage(tensor)
                key = id(storage)
                if key not in self.live and key not in self._foreign:
                    self._foreign[key] = weakref.ref(storage, lambda _, key=key: self._foreign.pop(key))  # type: ignore[misc]

    def changed(self, block: StorageRecord, change: int) -> None:
        self._blocks.append(block.number)
        self._changes.append(change)
        if block.number not in self._made:
            is_backward = self.phase == "activations" and is_in_backward()
            self._made[block.number] = "temporary" if is_backward else self.phase
            self._forwards[block.number] = self.module
        elif block.size == change > 0:
            self._made[block.number] = "gathered"  # it existed, and had no memory

    def _note_messages(self, values: Any, *, always: bool) -> None:
        """Note what was made for a collective: empty tensors, or with `always` all of them."""
        for tensor in list_tensors(values):
            if tensor.layout is torch.strided and not is_on_meta(tensor):
                block = self.live.get(id(get_storage(tensor)))
                if block is None or self._made.get(block.number) == "gathered":
                    continue
                if always or block.number in self._empty:
                    self._made[block.number] = "communication"

    def at_peak(self) -> MemorySnapshot:
        owners, activations = self._owners(self._peak_at)
        return MemorySnapshot(self.peak, owners, self._operator, activations, dict(self.peaks))

    def now(self) -> MemorySnapshot:
        return MemorySnapshot(self.total, self._owners(len(self._blocks))[0], "")

    def owners(self) -> dict[int, str]:
        return {number: self._owner(number) for number in self._blocks}

    def _owner(self, number: int) -> str:
        return self._owned.get(number) or self._made.get(number, "other")

    def _owners(self, until: int) -> tuple[dict[str, int], dict[str, int]]:
        """Return the bytes of each owner, and those of activations by module, after `until` changes."""
        held: Counter[str] = Counter()
        modules: Counter[str] = Counter()
        for number, change in zip(self._blocks[:until], self._changes[:until], strict=True):
            owner = self._owner(number)
            held[owner] += change
            if owner == "activations":
                modules[self._forwards[number]] += change
        owners = {owner: held[owner] for owner in OWNERS if held[owner]}
        return owners, {module: size for module, size in sorted(modules.items()) if size}

"""Measure which owners hold memory at the peak of a step, and which operator causes the peak.

[Note: owners] The owner of a block is the first of these that applies:
    parameters      parameters or shards of the model on this rank
    gradients       `.grad` of parameters at the end of the backward of a step
    optimizer       state of the optimizer
    gathered        memory that was resized from 0 bytes, as FSDP does to all-gather
    communication   read or written by a collective, and allocated by it or as an empty tensor
    activations     allocated in a forward
    temporary       allocated in a backward (recomputed activations included) or by the optimizer
    other           allocated before: buffers, batches

Memory that no operator allocated is not counted in a step, such as buffers from which gloo copies results. All size
changes in a step are logged, and owners at the peak are determined afterwards, when the use of each block is known.
"""

from __future__ import annotations

import weakref
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
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
LIBRARIES = "libraries"  # Owner of library workspaces in a plan, which operators do not show
MIN_BLOCK_SIZE = 512  # CUDA's allocator rounds sizes up to multiples of this [bytes]
_LIFT_FRESH = "aten.lift_fresh"
_NEW_EMPTY = torch.ops.aten.new_empty.default
_EMPTY_FACTORIES = ("aten.empty", "aten.new_empty", "aten.zeros", "aten.new_zeros")


@dataclass(frozen=True)
class MemorySnapshot:
    """Memory of a rank at one moment; for a peak, also activations by module and the peak of each phase [bytes]."""

    bytes: int
    bytes_by_owner: Mapping[str, int]
    operator: str
    activations_by_module: Mapping[str, int] = field(default_factory=dict)
    peak_by_phase: Mapping[str, int] = field(default_factory=dict)


class StepMeter(MemoryMeter, UncompiledMode):
    """Log memory changes in a step, without compilation. `is_real`: collectives run on a real process group."""

    def __init__(self, *, is_real: bool = False) -> None:
        super().__init__(round_to=MIN_BLOCK_SIZE)
        self._is_real = is_real
        self.phase, self.module = "other", ""
        self.next_observer: OperationObserver | None = (
            None  # called after the memory of an operator is logged, so that one dispatch mode serves both
        )
        self._created_as: dict[int, str] = {}
        self._module_by_block: dict[int, str] = {}
        self._assigned_owner: dict[int, str] = {}
        self._empty_blocks: set[int] = set()
        self._foreign_storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._log_blocks, self._log_deltas = array("q"), array("q")
        self.peak, self._peak_index, self._peak_operator = 0, 0, ""
        self.peak_by_phase: dict[str, int] = {}  # peak bytes in each `step_phase`

    @property
    def log(self) -> Iterator[tuple[int, int]]:
        return zip(self._log_blocks, self._log_deltas, strict=True)

    @property
    def log_length(self) -> int:
        return len(self._log_blocks)

    @property
    def step_phase(self) -> str:
        if self.phase == "activations":
            return "backward" if is_in_backward() else "forward"
        return "optimizer"

    def begin_step(self) -> None:
        """Begin a step: restart the log with the live blocks, and reset the peak."""
        self._log_blocks = array("q", (block.index for block in self.live_storages.values()))
        self._log_deltas = array("q", (block.nbytes for block in self.live_storages.values()))
        self.peak, self._peak_index, self._peak_operator = self.total_bytes, len(self._log_blocks), ""
        self.peak_by_phase = {}
        alive = set(self._log_blocks)
        self._created_as = {number: owner for number, owner in self._created_as.items() if number in alive}
        self._module_by_block = {number: module for number, module in self._module_by_block.items() if number in alive}
        self._empty_blocks &= alive

    def set_owner(self, tensors: Iterable[Tensor], owner: str) -> None:
        tensors = list(tensors)
        self.track(tensors)
        for tensor in tensors:
            block = self.live_storages.get(id(get_storage(tensor)))
            if block is not None:
                self._assigned_owner.setdefault(block.index, owner)

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.dispatch(func, types, args, kwargs)

    def observe(self, operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        # Skip tensors without elements, of which there may be one per rank.
        if operation is not _NEW_EMPTY or result.numel():
            self._record(operation, args, kwargs, result)
        if self.next_observer is not None:
            self.next_observer.observe(operation, args, kwargs, result)

    def _record(self, operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        before, name, given = len(self._log_blocks), get_operation_name(operation), list(list_tensors((args, kwargs)))
        if self.phase != "other" and not name.startswith(_LIFT_FRESH):
            self._mark_foreign(given)
        self.track(given if operation.is_view else [*given, *list_tensors(result)])  # as in `MemoryMeter.observe`
        if name.startswith(_EMPTY_FACTORIES):
            self._empty_blocks.update(self._log_blocks[before:])
        elif operation.namespace in COLLECTIVE_NAMESPACES:
            allocates = operation.namespace != "c10d" and not operation.overloadpacket.__name__.endswith("_")
            self._empty_blocks.update(self._log_blocks[before:])
            self._mark_communication(result if allocates else (), always=True)
            self._mark_communication((args, kwargs), always=False)
        phase = self.step_phase
        if self._is_real and self.total_bytes > self.peak_by_phase.get(phase, 0):
            wait_for_gloo_threads()
        self.peak_by_phase[phase] = max(self.total_bytes, self.peak_by_phase.get(phase, 0))
        # The last of equal peaks counts: a gradient is stored only after the operator that computes it.
        if self.total_bytes >= self.peak and operation.namespace != "profiler":
            self.peak, self._peak_index, self._peak_operator = self.total_bytes, len(self._log_blocks), name

    def track_storage(self, storage: torch.UntypedStorage) -> None:
        if id(storage) not in self._foreign_storages:
            super().track_storage(storage)

    def _mark_foreign(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if tensor.layout is torch.strided and not is_on_meta(tensor):
                storage = get_storage(tensor)
                key = id(storage)
                if key not in self.live_storages and key not in self._foreign_storages:
                    forget = partial(self._foreign_storages.pop, key)
                    self._foreign_storages[key] = weakref.ref(storage, lambda _, forget=forget: forget())  # type: ignore[misc]

    def on_size_change(self, block: StorageRecord, change: int) -> None:
        self._log_blocks.append(block.index)
        self._log_deltas.append(change)
        if block.index not in self._created_as:
            is_backward = self.phase == "activations" and is_in_backward()
            self._created_as[block.index] = "temporary" if is_backward else self.phase
            self._module_by_block[block.index] = self.module
        elif block.nbytes == change > 0:
            self._created_as[block.index] = "gathered"  # it existed, but had no memory

    def _mark_communication(self, values: Any, *, always: bool) -> None:
        """Mark blocks as communication: those allocated empty, or all with `always`."""
        for tensor in list_tensors(values):
            if tensor.layout is torch.strided and not is_on_meta(tensor):
                block = self.live_storages.get(id(get_storage(tensor)))
                if block is None or self._created_as.get(block.index) == "gathered":
                    continue
                if always or block.index in self._empty_blocks:
                    self._created_as[block.index] = "communication"

    def snapshot_peak(self) -> MemorySnapshot:
        owners, activations = self._sum_by_owner(self._peak_index)
        return MemorySnapshot(self.peak, owners, self._peak_operator, activations, dict(self.peak_by_phase))

    def snapshot_now(self) -> MemorySnapshot:
        return MemorySnapshot(self.total_bytes, self._sum_by_owner(len(self._log_blocks))[0], "")

    def owners_by_block(self) -> dict[int, str]:
        return {number: self._get_owner(number) for number in self._log_blocks}

    def _get_owner(self, number: int) -> str:
        return self._assigned_owner.get(number) or self._created_as.get(number, "other")

    def _sum_by_owner(self, until: int) -> tuple[dict[str, int], dict[str, int]]:
        """Return the bytes by owner, and those of activations by module, after `until` changes."""
        held: Counter[str] = Counter()
        modules: Counter[str] = Counter()
        for number, change in zip(self._log_blocks[:until], self._log_deltas[:until], strict=True):
            owner = self._get_owner(number)
            held[owner] += change
            if owner == "activations":
                modules[self._module_by_block[number]] += change
        owners = {owner: held[owner] for owner in OWNERS if held[owner]}
        return owners, {module: size for module, size in sorted(modules.items()) if size}

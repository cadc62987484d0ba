"""Observe every operation of a piece of code, and the memory of its tensors.

[Note: watched storages] Each storage counts once, with its current size, however many tensors view it. A storage is
known once an operation takes or returns a tensor over it. A weak reference reports when it is freed. While the meter
runs, its class is `_WatchedStorage`, which reports resizes. So nothing in torch is patched, and the cost per operation
does not grow with the number of tensors.
"""

from __future__ import annotations

import copy
import functools
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .._compat.torch import TorchDispatchMode, is_propagating_shapes
from ..tensors.ops import is_on_meta, list_tensors
from ._compat import is_wrapper_subclass


@functools.cache
def get_operation_name(operation: Any) -> str:
    """Return an operation's name, such as "aten.mm.default"."""
    return str(operation)


class OperationObserver(TorchDispatchMode):
    """Context manager that observes each operation on plain tensors, including those of backward.

    For DTensors and other wrappers, it observes the operations on their inner tensors.
    """

    @abstractmethod
    def observe(self, operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Called after each operation."""

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.dispatch(func, types, args, kwargs)

    def dispatch(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...], kwargs: Mapping[str, Any] | None
    ) -> Any:
        """Run an operation, observe it, and return its result."""
        if any(map(is_wrapper_subclass, types)):
            # torch calls the mode again for each operation on the inner tensors.
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        # Skip attribute access, and operations that only propagate shapes.
        if func.namespace != "prim" and not is_propagating_shapes():
            self.observe(func, args, kwargs or {}, result)
        return result


class _WatchedStorage(torch.UntypedStorage):
    """A storage that reports when it is resized, which no dispatch mode sees."""

    watchers: list[Callable[[torch.UntypedStorage], None]]

    def resize_(self, size: int) -> torch.UntypedStorage:
        super().resize_(size)
        for watcher in self.watchers:
            watcher(self)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.UntypedStorage:
        # torch's deepcopy supports only its own class. The copy is watched once an operation uses it.
        self.__class__ = torch.UntypedStorage
        try:
            copied = copy.deepcopy(self, memo)
        finally:
            self.__class__ = _WatchedStorage
        copied.__class__ = torch.UntypedStorage
        return copied


@dataclass
class StorageRecord:
    """One storage: its index in the order in which the meter has seen storages, and its current size [bytes]."""

    index: int
    nbytes: int
    reference: weakref.ref[torch.UntypedStorage]


class MemoryMeter(OperationObserver):
    """Measure the bytes of all known storages; see [Note: watched storages].

    `round_to`: round each size up to a multiple, as allocators do [bytes]; `total_bytes`: sum of the current sizes;
    `live_storages`: records by the `id` of the storage.
    """

    def __init__(self, *, round_to: int = 1) -> None:
        super().__init__()
        self.total_bytes = 0
        self.live_storages: dict[int, StorageRecord] = {}
        self._round_to, self._num_storages, self._is_running = round_to, 0, False

    def track(self, tensors: Iterable[Tensor]) -> None:
        """Start counting the storages of tensors."""
        for tensor in tensors:
            # A wrapper other than a DTensor has no memory besides that of its inner tensors.
            is_wrapper = is_wrapper_subclass(type(tensor)) and not isinstance(tensor, DTensor)
            if tensor.layout is not torch.strided or is_on_meta(tensor) or is_wrapper:
                continue
            storage = get_storage(tensor)
            block = self.live_storages.get(id(storage))
            if block is None:
                self.track_storage(storage)
            else:
                self._set_size(block, storage.nbytes())
                if self._is_running and type(storage) is torch.UntypedStorage:
                    self._watch(storage)

    def observe(self, operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        # The result of a view has the storage of its input.
        self.track(list_tensors((args, kwargs) if operation.is_view else (args, kwargs, result)))

    def on_size_change(self, block: StorageRecord, change: int) -> None:
        """Called when a storage has grown or shrunk by `change` bytes, including its allocation and release."""

    def track_storage(self, storage: torch.UntypedStorage) -> None:
        """Start counting a storage."""
        key = id(storage)
        block = StorageRecord(self._num_storages, 0, weakref.ref(storage, lambda _: self._on_freed(key)))
        self._num_storages += 1
        self.live_storages[key] = block
        if self._is_running:
            self._watch(storage)
        self._set_size(block, storage.nbytes())

    def _on_freed(self, key: int) -> None:
        if (block := self.live_storages.pop(key, None)) is not None:
            self._set_size(block, 0)

    def _on_resized(self, storage: torch.UntypedStorage) -> None:
        if (block := self.live_storages.get(id(storage))) is not None:
            self._set_size(block, storage.nbytes())

    def _set_size(self, block: StorageRecord, nbytes: int) -> None:
        size = -(-nbytes // self._round_to) * self._round_to
        if change := size - block.nbytes:
            block.nbytes = size
            self.total_bytes += change
            self.on_size_change(block, change)

    def __enter__(self) -> Any:
        self._is_running = True
        for storage in self._list_live_storages():
            self._on_resized(storage)
            self._watch(storage)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._is_running = False
        for storage in self._list_live_storages():
            if isinstance(storage, _WatchedStorage):
                storage.watchers.remove(self._on_resized)
                if not storage.watchers:
                    storage.__class__ = torch.UntypedStorage

    def _watch(self, storage: torch.UntypedStorage) -> None:
        if type(storage) is torch.UntypedStorage:
            storage.__class__ = _WatchedStorage
            storage.watchers = getattr(storage, "watchers", [])
        if isinstance(storage, _WatchedStorage) and self._on_resized not in storage.watchers:
            storage.watchers.append(self._on_resized)

    def _list_live_storages(self) -> list[torch.UntypedStorage]:
        storages = (block.reference() for block in list(self.live_storages.values()))
        return [storage for storage in storages if storage is not None]


def get_storage(tensor: Tensor) -> torch.UntypedStorage:
    """Return the storage of a tensor, or of the local tensor of a DTensor."""
    if isinstance(tensor, DTensor):
        # Under no_grad, to_local returns the tensor itself, not a view that autograd tracks.
        with torch.no_grad():
            tensor = tensor.to_local()
    return tensor.untyped_storage()

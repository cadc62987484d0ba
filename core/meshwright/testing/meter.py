"""Know at each operation how much memory the tensors of this rank hold, at a cost that does not grow with their number.

Storages are counted, each once and by its present size, whichever tensors look at it. One is known when an operation
first takes or gives a tensor over it; it tells of its end by a weak reference, and of its being resized by its class:
as long as the meter runs, it is one of `_Watched`. So nothing of torch is replaced, and nothing is summed up again.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..tensors.ops import is_on_meta, tensors_in
from ._compat import unwraps_itself
from .observe import Observer


class _Watched(torch.UntypedStorage):
    """A storage that tells when it is resized, which is no operation that a dispatch mode sees."""

    watchers: list[Callable[[torch.UntypedStorage], None]]

    def resize_(self, size: int) -> torch.UntypedStorage:
        super().resize_(size)
        for tell in self.watchers:
            tell(self)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.UntypedStorage:
        # torch takes its own class alone; a copy is watched when it is next seen.
        self.__class__ = torch.UntypedStorage
        try:
            copied = copy.deepcopy(self, memo)
        finally:
            self.__class__ = _Watched
        copied.__class__ = torch.UntypedStorage
        return copied


@dataclass
class Block:
    """The memory of one storage.

    Attributes:
        number: in the order in which the meter has come to know them.
        size: bytes, now.
        reference: tells of its end.
    """

    number: int
    size: int
    reference: weakref.ref[torch.UntypedStorage]


class Meter(Observer):
    """What all known storages hold.

    Args:
        round_to: sizes count as multiples of so many bytes, as allocators give them.

    Attributes:
        total: bytes, now.
        live: what is held, by the identity of the storage, which is kept as long as that lives.
    """

    def __init__(self, *, round_to: int = 1) -> None:
        super().__init__()
        self.total = 0
        self.live: dict[int, Block] = {}
        self._round_to, self._known, self._is_running = round_to, 0, False

    def see(self, tensors: Iterable[Tensor]) -> None:
        """Take up the storages of tensors, where they are new, and their sizes."""
        for tensor in tensors:
            if tensor.layout is not torch.strided or is_on_meta(tensor) or _is_empty_wrapper(tensor):
                continue
            storage = storage_of(tensor)
            block = self.live.get(id(storage))
            if block is None:
                self.take_up(storage)
            else:
                self._set_size(block, self._size(storage))
                if self._is_running and type(storage) is torch.UntypedStorage:
                    self._watch(storage)

    def observe(self, operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        # Views are of memory that is seen already.
        self.see(tensors_in((args, kwargs) if operation.is_view else (args, kwargs, result)))

    def changed(self, block: Block, change: int) -> None:
        """Called when a block has grown or shrunk by so many bytes, its first and its last included."""

    def take_up(self, storage: torch.UntypedStorage) -> None:
        """Count a storage from now on."""
        key = id(storage)
        block = Block(self._known, 0, weakref.ref(storage, lambda _: self._end(key)))
        self._known += 1
        self.live[key] = block
        if self._is_running:
            self._watch(storage)
        self._set_size(block, self._size(storage))

    def _end(self, key: int) -> None:
        block = self.live.pop(key, None)
        if block is not None:
            self._set_size(block, 0)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        block = self.live.get(id(storage))
        if block is not None:
            self._set_size(block, self._size(storage))

    def _set_size(self, block: Block, size: int) -> None:
        change = size - block.size
        if change:
            block.size = size
            self.total += change
            self.changed(block, change)

    def _size(self, storage: torch.UntypedStorage) -> int:
        return -(-storage.nbytes() // self._round_to) * self._round_to

    # -- only while it runs

    def __enter__(self) -> Any:
        self._is_running = True
        for storage in self._storages():
            self._set_size(self.live[id(storage)], self._size(storage))
            self._watch(storage)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._is_running = False
        for storage in self._storages():
            if isinstance(storage, _Watched):
                storage.watchers.remove(self._resized)
                if not storage.watchers:
                    storage.__class__ = torch.UntypedStorage

    def _watch(self, storage: torch.UntypedStorage) -> None:
        if type(storage) is torch.UntypedStorage:
            storage.__class__ = _Watched
            storage.watchers = getattr(storage, "watchers", [])
        if isinstance(storage, _Watched) and self._resized not in storage.watchers:
            storage.watchers.append(self._resized)

    def _storages(self) -> list[torch.UntypedStorage]:
        found = (block.reference() for block in list(self.live.values()))
        return [storage for storage in found if storage is not None]


def _is_empty_wrapper(tensor: Tensor) -> bool:
    """Whether a tensor has no memory beside that of the tensors inside, though its storage tells a size."""
    return unwraps_itself(type(tensor)) and not isinstance(tensor, DTensor)


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    """Of the tensor, or of this rank's part of a DTensor."""
    if isinstance(tensor, DTensor):
        # Without gradients, the local part is the tensor itself, not a view that autograd follows.
        with torch.no_grad():
            tensor = tensor.to_local()
    return tensor.untyped_storage()

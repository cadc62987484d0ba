"""Hold in host memory what blocks save for backward.

Results of a block, and the hidden states that it is given, go to host memory when autograd saves them, each storage
once, and come back when backward asks for the first tensor in it. Parameters, and what blocks are given besides
(masks, positions), stay: others hold them anyway.

On an accelerator host memory is pinned, and copies are ordered with the computation: no other stream runs ahead. On a
CPU, where both memories are one, tensors are copied all the same, so that what is proved there holds elsewhere.
Source: torch.autograd.graph.save_on_cpu, which copies each saved view by itself, and parameters, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from .._compat.torch import get_version, is_plain_tensor
from .forward_order import ForwardMethod
from .operators import find_hidden_states, get_storage, is_parameter_storage, iter_allocated_tensors


class OffloadedBlocks:
    """The blocks of one model; `bytes_offloaded` and `bytes_restored` were copied to host memory and back so far."""

    def __init__(self) -> None:
        self.bytes_offloaded = self.bytes_restored = 0

    def wrap_block(self, block: nn.Module, original: ForwardMethod) -> ForwardMethod:
        """Return the forward of a block whose saved tensors go to host memory."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not (block.training and torch.is_grad_enabled()):
                return original(*args, **kwargs)
            call = _OffloadedCall(self, block, (args, kwargs))
            with saved_tensors_hooks(call.pack, lambda packed: packed()):
                return original(*args, **kwargs)

        return forward


class _OffloadedCall:
    def __init__(self, blocks: OffloadedBlocks, block: nn.Module, inputs: Any) -> None:
        self._blocks, self._block = blocks, block
        stays = [each for module in block.modules() for each in (*module.parameters(False), *module.buffers(False))]
        hidden = find_hidden_states(inputs)
        stays += [each for each in iter_allocated_tensors(inputs) if each is not hidden]
        self._excluded_storages = set(map(get_storage, stays))
        # By autograd's count of writes.
        self._offloaded: WeakKeyDictionary[torch.UntypedStorage, dict[int, _OffloadedStorage]] = WeakKeyDictionary()

    def pack(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Return what autograd holds instead of a tensor: a function that gives it back."""
        if isinstance(tensor, DTensor):
            with torch.no_grad():
                local = self.pack(tensor.to_local())
            place, shape, stride = (tensor.device_mesh, tensor.placements), tensor.shape, tensor.stride()
            return lambda: DTensor.from_local(local(), *place, run_check=False, shape=shape, stride=stride)
        storage = tensor.untyped_storage()
        stays = isinstance(tensor, nn.Parameter) or not is_plain_tensor(tensor) or tensor.layout is not torch.strided
        # Memory that this dtype does not divide was made for another.
        if stays or self._is_excluded(storage) or storage.nbytes() % tensor.itemsize:
            kept = tensor.detach() if tensor.grad_fn is not None else tensor
            return lambda: kept
        moved, version = self._offloaded.setdefault(storage, {}), get_version(tensor)
        if version not in moved:
            count = storage.nbytes() // tensor.itemsize
            moved[version] = _OffloadedStorage(
                self._blocks, tensor.detach().as_strided((count,), (1,), 0).view(torch.uint8)
            )
        return moved[version].make_unpack(tensor)

    def _is_excluded(self, storage: torch.UntypedStorage) -> bool:
        """Return whether a storage stays; that of parameters may have been gathered since the call began."""
        if storage not in self._excluded_storages and is_parameter_storage(self._block, storage):
            self._excluded_storages.add(storage)
        return storage in self._excluded_storages


class _OffloadedStorage:
    """A storage of a device, given as a 1-D uint8 tensor, in host memory, with a count of tensors not asked for."""

    def __init__(self, blocks: OffloadedBlocks, storage: Tensor) -> None:
        self._blocks, self._device, self._num_pending = blocks, storage.device, 0
        self._host = torch.empty(storage.numel(), dtype=torch.uint8, pin_memory=storage.device.type != "cpu")
        self._host.copy_(storage, non_blocking=True)
        self._restored: Tensor | None = None
        blocks.bytes_offloaded += storage.numel()

    def make_unpack(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Return a function that gives back a tensor in this storage."""
        self._num_pending += 1
        dtype, place = tensor.dtype, (tensor.shape, tensor.stride(), tensor.storage_offset())
        was_asked_for = False

        def back() -> Tensor:
            nonlocal was_asked_for
            self._num_pending -= not was_asked_for
            was_asked_for = True
            return self._restore().view(dtype).as_strided(*place)

        return back

    def _restore(self) -> Tensor:
        """Return the storage on the device, copied once for all tensors in it."""
        whole = self._restored
        if whole is None:
            whole = torch.empty_like(self._host, device=self._device, pin_memory=False)
            whole.copy_(self._host, non_blocking=True)
            self._blocks.bytes_restored += whole.numel()
        self._restored = whole if self._num_pending > 0 else None
        return whole

"""Offload what blocks save for backward to host memory.

Results of a block and its hidden states are copied to host memory when autograd saves them, each storage once. They are
copied back when backward requests the first tensor in it. Parameters and other inputs of blocks (masks, positions) stay
on the device, because they are kept elsewhere anyway.

On an accelerator, host memory is pinned, and copies are ordered with the computation on the same stream. On a CPU,
where both memories are the same, tensors are copied too, so that tests on a CPU cover the same code. Source:
torch.autograd.graph.save_on_cpu, which copies each saved view separately, and also parameters.
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
    """The blocks of one model. `bytes_offloaded` and `bytes_restored` count bytes copied to host memory and back."""

    def __init__(self) -> None:
        self.bytes_offloaded = self.bytes_restored = 0

    def wrap_block(self, block: nn.Module, original: ForwardMethod) -> ForwardMethod:
        """Return the forward of a block whose saved tensors are offloaded."""

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
        excluded = [each for module in block.modules() for each in (*module.parameters(False), *module.buffers(False))]
        hidden = find_hidden_states(inputs)
        excluded += [each for each in iter_allocated_tensors(inputs) if each is not hidden]
        self._excluded_storages = set(map(get_storage, excluded))
        # By autograd's version counter.
        self._offloaded: WeakKeyDictionary[torch.UntypedStorage, dict[int, _OffloadedStorage]] = WeakKeyDictionary()

    def pack(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Return what autograd saves instead of a tensor: a function that restores it."""
        if isinstance(tensor, DTensor):
            with torch.no_grad():
                local = self.pack(tensor.to_local())
            placement, shape, stride = (tensor.device_mesh, tensor.placements), tensor.shape, tensor.stride()
            return lambda: DTensor.from_local(local(), *placement, run_check=False, shape=shape, stride=stride)
        storage = tensor.untyped_storage()
        is_excluded = (
            isinstance(tensor, nn.Parameter) or not is_plain_tensor(tensor) or tensor.layout is not torch.strided
        )
        # A storage whose size is not a multiple of this dtype's was allocated for another.
        if is_excluded or self._is_excluded(storage) or storage.nbytes() % tensor.itemsize:
            detached = tensor.detach() if tensor.grad_fn is not None else tensor
            return lambda: detached
        versions, version = self._offloaded.setdefault(storage, {}), get_version(tensor)
        if version not in versions:
            count = storage.nbytes() // tensor.itemsize
            versions[version] = _OffloadedStorage(
                self._blocks, tensor.detach().as_strided((count,), (1,), 0).view(torch.uint8)
            )
        return versions[version].make_unpack(tensor)

    def _is_excluded(self, storage: torch.UntypedStorage) -> bool:
        """Return whether a storage stays; parameters may have been gathered since the call began."""
        if storage not in self._excluded_storages and is_parameter_storage(self._block, storage):
            self._excluded_storages.add(storage)
        return storage in self._excluded_storages


class _OffloadedStorage:
    """Copy of a device storage, given as 1-D uint8, in host memory. Counts the tensors not yet restored."""

    def __init__(self, blocks: OffloadedBlocks, storage: Tensor) -> None:
        self._blocks, self._device, self._num_pending = blocks, storage.device, 0
        self._host = torch.empty(storage.numel(), dtype=torch.uint8, pin_memory=storage.device.type != "cpu")
        self._host.copy_(storage, non_blocking=True)
        self._restored: Tensor | None = None
        blocks.bytes_offloaded += storage.numel()

    def make_unpack(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Return a function that restores a tensor in this storage."""
        self._num_pending += 1
        dtype, geometry = tensor.dtype, (tensor.shape, tensor.stride(), tensor.storage_offset())
        was_restored = False

        def unpack() -> Tensor:
            nonlocal was_restored
            self._num_pending -= not was_restored
            was_restored = True
            return self._restore().view(dtype).as_strided(*geometry)

        return unpack

    def _restore(self) -> Tensor:
        """Return the storage on the device, copied once for all tensors in it."""
        restored = self._restored
        if restored is None:
            restored = torch.empty_like(self._host, device=self._device, pin_memory=False)
            restored.copy_(self._host, non_blocking=True)
            self._blocks.bytes_restored += restored.numel()
        self._restored = restored if self._num_pending > 0 else None
        return restored

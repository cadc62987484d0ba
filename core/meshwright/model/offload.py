"""Let what blocks hold for backward lie in host memory until then.

Results of a block, and the hidden states that it is given, go to host memory when autograd saves them, each memory
once, and come back when backward asks for the first of what lies in it. Parameters, and what blocks are given besides
(masks, positions), stay where they are: others hold them anyway.

On an accelerator host memory is pinned, and copies are ordered with the computation: no other stream runs ahead. On a
CPU, where both memories are one, it is copied all the same, so that what is proved there holds elsewhere.
Source: torch.autograd.graph.save_on_cpu, which copies each saved view by itself, and parameters, too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from .._compat.planning import is_plain
from .._compat.torch import version_of
from .forward_order import ForwardMethod
from .operators import hidden_in, is_parameter_of, storage_in, tensors_with_memory


class OffloadedBlocks:
    """The blocks of one model.

    Attributes:
        bytes_out, bytes_back: that were copied to host memory and back, since it was made.
    """

    def __init__(self) -> None:
        self.bytes_out = self.bytes_back = 0

    def put_around(self, block: nn.Module, original: ForwardMethod) -> ForwardMethod:
        """The forward of a block, around which saved tensors go to host memory."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not (block.training and torch.is_grad_enabled()):
                return original(*args, **kwargs)
            call = _Call(self, block, (args, kwargs))
            with saved_tensors_hooks(call.pack, _unpacked):
                return original(*args, **kwargs)

        return forward


class _Call:
    """One call of a block."""

    def __init__(self, blocks: OffloadedBlocks, block: nn.Module, given: Any) -> None:
        self._blocks, self._block = blocks, block
        stays = [each for module in block.modules() for each in (*module.parameters(False), *module.buffers(False))]
        hidden = hidden_in(given)
        stays += [each for each in tensors_with_memory(given) if each is not hidden]
        # Held, so that no other memory gets the same identity.
        self._stays = {id(storage): storage for storage in map(storage_in, stays)}
        self._moved: dict[tuple[int, int], tuple[Callable[[], Any], _Moved | None]] = {}

    def pack(self, tensor: Tensor) -> Any:
        """What autograd holds in the place of a tensor."""
        if isinstance(tensor, DTensor):
            with torch.no_grad():
                return _Divided(tensor, self.pack(tensor.to_local()))
        storage = tensor.untyped_storage()
        stays = isinstance(tensor, nn.Parameter) or not is_plain(tensor) or tensor.layout is not torch.strided
        # Memory that this dtype does not divide was made for another.
        if stays or self._keeps(storage) or storage.nbytes() % tensor.itemsize:
            return tensor.detach() if tensor.grad_fn is not None else tensor
        return _View(self._move(tensor, version_of(tensor)), tensor)

    def _keeps(self, storage: torch.UntypedStorage) -> bool:
        """Whether a memory stays; that of parameters may have been gathered since the call began."""
        if id(storage) not in self._stays and is_parameter_of(self._block, storage):
            self._stays[id(storage)] = storage
        return id(storage) in self._stays

    def _move(self, tensor: Tensor, version: int) -> _Moved:
        storage = tensor.untyped_storage()
        known, moved = self._moved.get((id(storage), version), (lambda: None, None))
        if moved is None or known() is not storage:
            count = storage.nbytes() // tensor.itemsize
            moved = _Moved(self._blocks, tensor.detach().as_strided((count,), (1,), 0).view(torch.uint8))
            self._moved[id(storage), version] = weakref.ref(storage), moved
        return moved


class _Moved:
    """Memory of a device that lies in host memory.

    Args:
        whole: all of it, 1-D, uint8.

    Attributes:
        views: that are in it and have not been asked for.
    """

    def __init__(self, blocks: OffloadedBlocks, whole: Tensor) -> None:
        self.views = 0
        self._blocks, self._device = blocks, whole.device
        self._host = torch.empty(whole.numel(), dtype=torch.uint8, pin_memory=whole.device.type != "cpu")
        self._host.copy_(whole, non_blocking=True)
        self._back: Tensor | None = None
        blocks.bytes_out += whole.numel()

    def back(self) -> Tensor:
        """The memory on the device, 1-D, uint8, copied once for all views."""
        whole = self._back
        if whole is None:
            whole = torch.empty_like(self._host, device=self._device, pin_memory=False)
            whole.copy_(self._host, non_blocking=True)
            self._blocks.bytes_back += whole.numel()
        self._back = whole if self.views > 0 else None
        return whole


class _View:
    """A tensor in memory that has moved."""

    def __init__(self, moved: _Moved, tensor: Tensor) -> None:
        moved.views += 1
        self._moved, self._dtype, self._was_asked_for = moved, tensor.dtype, False
        self._place = tensor.shape, tensor.stride(), tensor.storage_offset()

    def unpacked(self) -> Tensor:
        self._moved.views -= not self._was_asked_for
        self._was_asked_for = True
        return self._moved.back().view(self._dtype).as_strided(*self._place)


class _Divided:
    """A DTensor of which this rank's part has moved, or stays."""

    def __init__(self, whole: DTensor, local: Any) -> None:
        self._local = local
        self._place = whole.device_mesh, whole.placements
        self._shape, self._stride = whole.shape, whole.stride()

    def unpacked(self) -> Tensor:
        local = _unpacked(self._local)
        return DTensor.from_local(local, *self._place, run_check=False, shape=self._shape, stride=self._stride)


def _unpacked(packed: Any) -> Tensor:
    tensor: Tensor = packed.unpacked() if isinstance(packed, (_View, _Divided)) else packed
    return tensor

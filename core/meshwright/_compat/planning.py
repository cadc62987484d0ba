"""Private names of torch that planning needs: tensors without memory, and process groups that send nothing.

Both are what torch tests itself with; it has no public ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    _BypassDispatchCache,
    _CacheKeyState,
    _DispatchCacheValidEntry,
)
from torch.distributed._functional_collectives import AsyncCollectiveTensor

DEPENDS_ON_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
"""Raised where shapes do not tell what an operator gives."""


_TOLD = (bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
"""What operators are given beside tensors; numbers that are equal may be of different types."""


class Fakes:
    """Makes tensors that have a shape, a dtype and a device, but no memory; real ones may be among what it is given.

    The mode is called, and not entered: a mode that is at work gives no memory to storages either, not even to those
    that messages of Python objects are made of.

    [Note: what torch has found out] The mode keeps for each operator what it gives for shapes, by a key that takes it
    as long as all the rest. Here a shorter key leads to that entry. `_cache_key`, `cache` and
    `_output_from_cache_entry` are those of torch 2.13.
    """

    _known: ClassVar[dict[tuple[Any, ...], tuple[Any, Any, Any] | None]] = {}

    def __init__(self) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)

    def computed(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an operator gives, without memory."""
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
            func, args, kwargs = _of_groups(args, kwargs)
        told = self._told(func, args, kwargs)
        try:
            if told is None:
                return self._mode.dispatch(func, types, args, kwargs)
            if told not in self._known:
                return self._first(told, func, types, args, kwargs)
            known = self._known[told]
            if known is None:
                return self._mode.dispatch(func, types, args, kwargs)
            state, entry, key = known
            return self._mode._output_from_cache_entry(state, entry, key, func, args)
        finally:
            # It keeps weak references to what it makes, and `nn.Module.to` refuses tensors that have some.
            self._mode.fake_tensor_converter.tensor_memo.clear()

    def _first(
        self, told: tuple[Any, ...], func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """As `computed`, and takes down what torch keeps of it."""
        state, key = _CacheKeyState(None), None
        with suppress(_BypassDispatchCache):
            key = self._mode._cache_key(state, func, args, kwargs)
        made = self._mode.dispatch(func, types, args, kwargs)
        entry = None if key is None else FakeTensorMode.cache.get(key)
        self._known[told] = (state, entry, key) if isinstance(entry, _DispatchCacheValidEntry) else None
        return made

    def _told(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
        """A key of an operator on tensors of these alone; None: it has none."""
        found: list[Any] = [func, torch.get_default_dtype()]
        return tuple(found) if self._tell(found, args) and self._tell(found, tuple(kwargs.items())) else None

    def _tell(self, found: list[Any], values: Sequence[Any]) -> bool:
        for value in values:
            if isinstance(value, FakeTensor):
                if value.constant is not None or value.layout is not torch.strided or value.dtype.is_complex:
                    return False
                found += (value.shape, value.stride(), value.storage_offset(), value.dtype, value.requires_grad)
                found += (value.fake_device, type(value), value.untyped_storage().nbytes())
            elif isinstance(value, Tensor):
                return False
            elif isinstance(value, list | tuple):
                found.append(len(value))
                if not self._tell(found, value):
                    return False
            elif value is None or isinstance(value, _TOLD):
                found += (type(value), value)
            else:
                return False
        return True

    def device(self, tensor: Tensor) -> torch.device:
        """Where a tensor would lie."""
        return tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device

    def knows(self, tensor: Tensor) -> bool:
        """Whether a tensor is one of these."""
        return isinstance(tensor, FakeTensor) and tensor.fake_mode is self._mode


def _of_groups(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """What makes a tensor as a grouped product does, rows at multiples of 16 bytes.

    torch's own answer for shapes refuses all but bfloat16, which its kernels do not.
    """
    left, right = args[:2]
    if left.dim() == right.dim() == 2:
        offsets = args[2] if len(args) > 2 else kwargs["offs"]
        size = [offsets.shape[0], left.shape[0], right.shape[1]]
    elif left.dim() == right.dim():
        size = [left.shape[0], left.shape[1], right.shape[2]]
    else:
        size = [left.shape[-2], right.shape[-1]]
    unit = 16 // left.element_size()
    stride = [-(-size[-1] // unit) * unit, 1]
    if len(size) == 3:
        stride.insert(0, size[1] * stride[0])
    return torch.ops.aten.new_empty_strided.default, (left, size, stride), {}


def handed_on(func: Any, given: Sequence[Tensor]) -> Tensor | None:
    """What stands for the result of a collective until it is there, and what is there then: no memory of its own.

    None for other operators. Their answers for shapes alone are new tensors, which plain code never sees.
    """
    if func.namespace != "_c10d_functional":
        return None
    name = str(func)
    if name == "_c10d_functional._wrap_tensor_autograd.default":
        return AsyncCollectiveTensor(given[0])
    return given[0] if name == "_c10d_functional.wait_tensor.default" else None


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is of torch's own class or a parameter, and no other subclass; without memory, too."""
    return type(tensor) in (Tensor, nn.Parameter, FakeTensor)


def is_asking_for_shapes() -> bool:
    """Whether torch, in the middle of a program, looks for the shapes that an operator would give, as DTensor does for
    those that it first sees.
    """
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def start_fake_group(rank: int, size: int) -> None:
    """Join a process group of any size that sends nothing: what is received is what was there before."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore(), timeout=timedelta(seconds=600))


def in_backward() -> bool:
    """Whether autograd is running a backward in this thread."""
    return torch._C._current_graph_task_id() != -1

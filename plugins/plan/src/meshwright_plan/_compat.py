"""Private names of torch that planning needs: fake tensors and fake process groups, with which torch tests itself.

[Note: fake tensors] `FakeTensorDispatcher` calls torch's mode without entering it, since an entered mode gives no
memory to storages either, not even to messages of Python objects. torch's cache of results by shape computes a key that
takes as long as all the rest; a shorter key here leads to its entry (`_cache_key`, `cache`, `_output_from_cache_entry`
of torch 2.13).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
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

DATA_DEPENDENT_ERRORS = (DataDependentOutputException, DynamicOutputShapeException)
"""Raised where the result of an operator does not follow from shapes."""
_SCALAR_TYPES = (bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
"""Arguments besides tensors; numbers that are equal may be of different types."""


class FakeTensorDispatcher:
    """Makes tensors with a shape, dtype and device, but no memory; see [Note: fake tensors]."""

    _cache: ClassVar[dict[tuple[Any, ...], tuple[Any, Any, Any] | None]] = {}

    def __init__(self) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)

    def dispatch(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
            func, args, kwargs = _rewrite_grouped_mm(args, kwargs)
        parts: list[Any] = [func, torch.get_default_dtype()]
        has_key = self._extend_key(parts, args) and self._extend_key(parts, tuple(kwargs.items()))
        short = tuple(parts)
        try:
            if has_key and short not in self._cache:
                state, key = _CacheKeyState(None), None
                with suppress(_BypassDispatchCache):
                    key = self._mode._cache_key(state, func, args, kwargs)
                made = self._mode.dispatch(func, types, args, kwargs)
                entry = None if key is None else FakeTensorMode.cache.get(key)
                self._cache[short] = (state, entry, key) if isinstance(entry, _DispatchCacheValidEntry) else None
                return made
            known = self._cache[short] if has_key else None
            if known is None:
                return self._mode.dispatch(func, types, args, kwargs)
            return self._mode._output_from_cache_entry(*known, func, args)
        finally:
            # It keeps weak references to what it makes, and `nn.SourceModule.to` refuses tensors that have some.
            self._mode.fake_tensor_converter.tensor_memo.clear()

    def _extend_key(self, key: list[Any], values: Sequence[Any]) -> bool:
        """Add values to a key; False if it would not determine the result."""
        for value in values:
            if isinstance(value, FakeTensor):
                if value.constant is not None or value.layout is not torch.strided or value.dtype.is_complex:
                    return False
                key += (value.shape, value.stride(), value.storage_offset(), value.dtype, value.requires_grad)
                key += (value.fake_device, type(value), value.untyped_storage().nbytes())
            elif isinstance(value, Tensor):
                return False
            elif isinstance(value, list | tuple):
                key.append(len(value))
                if not self._extend_key(key, value):
                    return False
            elif value is None or isinstance(value, _SCALAR_TYPES):
                key += (type(value), value)
            else:
                return False
        return True

    def get_device(self, tensor: Tensor) -> torch.device:
        return tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device

    def is_fake(self, tensor: Tensor) -> bool:
        return isinstance(tensor, FakeTensor) and tensor.fake_mode is self._mode


def _rewrite_grouped_mm(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Make a grouped product's result, rows at multiples of 16 bytes; fake tensors are refused in all but bfloat16."""
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


def pass_through_collective(func: Any, tensors: Sequence[Tensor]) -> Tensor | None:
    """Return the result of an operator that wraps or waits for a collective, without memory; None for others."""
    if func.namespace != "_c10d_functional":
        return None
    name = str(func)
    if name == "_c10d_functional._wrap_tensor_autograd.default":
        return AsyncCollectiveTensor(tensors[0])
    return tensors[0] if name == "_c10d_functional.wait_tensor.default" else None


def init_fake_process_group(rank: int, size: int) -> None:
    """Join a process group of any size that sends nothing, and leaves receive buffers as they are."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore(), timeout=timedelta(seconds=600))


def is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1

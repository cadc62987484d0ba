"""Private API of torch that planning needs: fake tensors and fake process groups.

[Note: fake tensors] `FakeTensorDispatcher` calls torch's `FakeTensorMode` without entering it. An entered mode would
also allocate no memory for storages, not even for messages that carry Python objects. torch caches results by shape,
but computing its key takes as long as everything else; a shorter key here maps to the cache entry (`_cache_key`,
`cache`, `_output_from_cache_entry` of torch 2.13).
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
"""Errors raised if the result of an operator depends on values, not only on shapes."""
_SCALAR_TYPES = (bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
"""Types of non-tensor arguments. Keys include the type, since equal numbers may differ in type."""


class FakeTensorDispatcher:
    """Run operators on fake tensors, which have a shape, dtype and device but no memory; see [Note: fake tensors]."""

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
                result = self._mode.dispatch(func, types, args, kwargs)
                entry = None if key is None else FakeTensorMode.cache.get(key)
                self._cache[short] = (state, entry, key) if isinstance(entry, _DispatchCacheValidEntry) else None
                return result
            known = self._cache[short] if has_key else None
            if known is None:
                return self._mode.dispatch(func, types, args, kwargs)
            return self._mode._output_from_cache_entry(*known, func, args)
        finally:
            # The mode keeps weak references to its results, and `nn.Module.to` refuses tensors with weak references.
            self._mode.fake_tensor_converter.tensor_memo.clear()

    def _extend_key(self, key: list[Any], values: Sequence[Any]) -> bool:
        """Append values to a cache key. Return False if the key would not determine the result."""
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
    """Replace `_grouped_mm`, which takes only bfloat16 fake tensors, by an allocation with rows padded to 16 bytes."""
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
    """Return the result of an operator that wraps or awaits a collective, without allocating; None for others."""
    if func.namespace != "_c10d_functional":
        return None
    name = str(func)
    if name == "_c10d_functional._wrap_tensor_autograd.default":
        return AsyncCollectiveTensor(tensors[0])
    return tensors[0] if name == "_c10d_functional.wait_tensor.default" else None


def init_fake_process_group(rank: int, size: int) -> None:
    """Join a fake process group of any size: it sends nothing and leaves receive buffers unchanged."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore(), timeout=timedelta(seconds=600))


def is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1

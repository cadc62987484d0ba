"""Private names of torch that tracing uses; tests/contract/test_compat.py has a canary for each."""

from __future__ import annotations

import functools
import gc
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import _redistribute


def bind_arguments(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by the names in the operation's schema; omitted arguments are not included.

    Uses a private name because torch has no public function for an operation's schema.
    """
    return {**dict(zip(_get_argument_names(operation), args, strict=False)), **kwargs}


@functools.cache
def _get_argument_names(operation: Any) -> tuple[str, ...]:
    return tuple(argument.name for argument in operation._schema.arguments)


def resolve_process_group(value: Any) -> dist.ProcessGroup:
    """Return the process group of a collective from the argument of its operation: a name, or a boxed group."""
    if isinstance(value, dist.ProcessGroup):
        return value
    return _resolve_process_group(value) if isinstance(value, str) else dist.ProcessGroup.unbox(value)


def is_wrapper_subclass(tensor_type: type) -> bool:
    """Return whether a tensor class wraps plain tensors and runs operations on them, as DTensor does."""
    is_wrapper = _WRAPPER_SUBCLASSES.get(tensor_type)
    if is_wrapper is None:
        is_wrapper = _WRAPPER_SUBCLASSES[tensor_type] = hasattr(tensor_type, "__tensor_flatten__")
    return is_wrapper


_WRAPPER_SUBCLASSES: dict[type, bool] = {}


_FROZEN_CACHES: list[Any] = []
"""Caches that `gc.get_objects` no longer returns."""


def freeze_gc() -> None:
    """Call `gc.freeze`, and remember the caches that `clear_mesh_caches` has to clear."""
    _FROZEN_CACHES.extend(_find_caches())
    gc.freeze()


def clear_mesh_caches() -> None:
    """Clear torch's caches of DTensor layouts, which keep meshes of destroyed groups alive.

    Otherwise the threads of each gloo group would continue to poll. Uses private names because torch expects one mesh
    per process and has no public function for this.
    """
    for cache in (*_FROZEN_CACHES, *_find_caches()):
        cache.cache_clear()
    for owner, name in (
        (torch._C, "_clear_DTensor_sharding_propagator_cache"),
        (_redistribute, "clear_redistribute_planner_cache"),
    ):
        if (clear := getattr(owner, name, None)) is not None:
            clear()


def _find_caches() -> list[Any]:
    wrappers = [each for each in gc.get_objects() if type(each) is functools._lru_cache_wrapper]
    return [each for each in wrappers if (each.__module__ or "").startswith("torch.distributed.")]

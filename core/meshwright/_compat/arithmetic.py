"""Floating-point operations of torch's operators, which it names by private schemas."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from .torch import is_attention, names_of_arguments


def arithmetic(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    """Floating-point operations of a matrix product, an attention or a convolution; 0 for other operators.

    torch counts them, too, but neither for attention on a CPU nor for grouped products, and of a causal attention all
    pairs.
    """
    name = _plain_name(operator)
    if is_attention(operator):
        return _of_attention(operator, args, kwargs)
    tensors = [each for each in args if isinstance(each, Tensor)]
    if name in ("mm", "bmm", "_grouped_mm", "addmm", "baddbmm"):
        left = tensors[1] if name in ("addmm", "baddbmm") else tensors[0]
        # What groups have between them, such as rows of experts' weights' gradients, each uses its part of.
        groups = result.shape[0] if name == "_grouped_mm" and left.dim() == 2 and result.dim() == 3 else 1
        return 2 * int(result.numel()) * left.shape[-1] // groups
    if name in ("convolution", "_convolution"):
        return 2 * int(result.numel()) * tensors[1][0].numel()
    return 0


@functools.cache
def _plain_name(operator: Any) -> str:
    return str(operator).removeprefix("aten.").split(".")[0].removesuffix("_")


def _of_attention(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Of the pairs of a query and a key that act on each other: two products in forward, five in backward.

    `_schema` tells what arguments mean; flex attention has none, begins with query, key and value, and has a mask.
    """
    names = names_of_arguments(operator)
    given = {**dict(zip(names or ("query", "key", "value"), args, strict=False)), **kwargs}
    query, key, value = (given[name] for name in ("query", "key", "value"))
    mask = given.get("attn_mask") if "attn_mask" in names else given.get("attn_bias")
    is_causal = bool(given.get("is_causal"))
    # Kernels that know no masks take the last query for the one of the last key, where they are causal.
    is_aligned_at_end = not {"attn_mask", "attn_bias"}.intersection(names)
    queries, keys = query.shape[-2], key.shape[-2]
    if is_causal and not is_aligned_at_end:
        keys_before = 0
    elif is_causal or mask is not None or not names:
        keys_before = keys - queries
    else:
        keys_before = keys
    pairs = query.shape[:-2].numel() * _pairs(queries, keys, keys_before)
    if "backward" in str(operator):
        return 2 * pairs * (3 * query.shape[-1] + 2 * value.shape[-1])
    return 2 * pairs * (query.shape[-1] + value.shape[-1])


def _pairs(queries: int, keys: int, before: int) -> int:
    """Pairs where query i acts on the first `before + i + 1` of the keys."""
    first = max(0, -before)
    # Queries whose keys grow one by one, and those that have all.
    growing = max(0, min(queries, keys - before) - first)
    least = before + first + 1
    return growing * least + growing * (growing - 1) // 2 + max(0, queries - first - growing) * keys

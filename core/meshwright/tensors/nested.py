"""Tensors within other values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

_PLAIN = (int, float, complex, str, type(None), torch.dtype, torch.device)
"""Have none inside, and are most of what operators are given."""


def is_on_meta(tensor: Tensor) -> bool:
    """Whether a tensor is on the meta device.

    As `is_meta`, which asks all dispatch modes where a tensor has no memory, as those of a plan.
    """
    return tensor.device.type == "meta"


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of nested lists, tuples and mappings, in their order."""
    found: list[Tensor] = []
    _collect((value,), found)
    return found


def _collect(values: Iterable[Any], found: list[Tensor]) -> None:
    for each in values:
        if isinstance(each, Tensor):
            found.append(each)
        elif isinstance(each, _PLAIN):
            continue
        elif isinstance(each, (list, tuple)):
            _collect(each, found)
        elif isinstance(each, Mapping):
            _collect(each.values(), found)

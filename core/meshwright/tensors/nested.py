"""Tensors within other values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of nested lists, tuples and mappings, in their order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, _PLAIN):
        return
    elif isinstance(value, (list, tuple)):
        for each in value:
            if isinstance(each, Tensor):
                yield each
            elif not isinstance(each, _PLAIN):
                yield from tensors_in(each)
    elif isinstance(value, Mapping):
        yield from tensors_in(list(value.values()))

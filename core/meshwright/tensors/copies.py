"""Copies of many tensors in few kernel launches."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .._compat.torch import foreach_copy_


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each tensor into another of its shape, rounded to that one's dtype."""
    foreach_copy_(targets, sources)

"""The only place in core that touches private or version-dependent names of torch.

Each function says why it is needed and with which versions it was tried; tests/test_compat.py holds a canary for each,
which fails when the name goes away or its behaviour changes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


def flatten_mesh(mesh: DeviceMesh, axes: Sequence[str], name: str) -> DeviceMesh:
    """Register the view `name` over `axes` in the root mesh, so that it can be sliced together with other axes.

    Private because torch has no public call for it; `fully_shard` needs views and axes of one root mesh.
    Tried with torch 2.11 (by reading) and 2.13.
    """
    return mesh[tuple(axes)]._flatten(name)


def foreach_norm(tensors: Sequence[Tensor], norm_type: float, dtype: torch.dtype | None = None) -> list[Tensor]:
    """The p-norm of each tensor, in few kernel launches; computed in `dtype`, or in the tensors' own.

    `torch.nn.utils.get_total_norm` does the same, but puts the norms together in the tensors' dtype.
    Tried with torch 2.11 (by reading) and 2.13.
    """
    return list(torch._foreach_norm(tensors, norm_type, dtype=dtype)) if tensors else []


def foreach_mul_(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply all tensors in place by a 0-dim factor, in few kernel launches.

    `torch.nn.utils.clip_grads_with_norm_` does the same, but takes parameters, not the local parts of DTensors.
    Tried with torch 2.11 (by reading) and 2.13.
    """
    if tensors:
        torch._foreach_mul_(tensors, factor)

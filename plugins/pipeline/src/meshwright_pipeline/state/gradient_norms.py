"""Norms of the gradients of a model in stages, in which each parameter counts once."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.manager.data_parallel import DataParallelManager
from meshwright.mesh.mesh import Mesh
from meshwright.model.layout import in_order
from meshwright.tensors.norms import joined_norm

from .copies import Copies
from .parameter_names import Names


def total_norm(managers: Mapping[int, DataParallelManager], copies: Copies, norm_type: float, mesh: Mesh) -> Tensor:
    """Of all stages; float64 scalar, equal on all ranks. Collective."""
    norms = [
        manager.gradients.total_norm(norm_type, without=copies.repeated(index)) for index, manager in managers.items()
    ]
    return joined_norm(norms, norm_type, mesh.group("pp"), mesh.device)


def norms_by_part(
    managers: Mapping[int, DataParallelManager], names: Names, copies: Copies, mesh: Mesh
) -> dict[str, float]:
    """See `StrategyManager.gradient_norms`."""
    parts = in_order(names.parts.values())
    squares = torch.zeros(len(parts), dtype=torch.float64)
    for index, manager in managers.items():
        squares += manager.gradients.squares(copies.counted(index), parts)
    squares = squares.to(mesh.device)
    dist.all_reduce(squares, group=mesh.group("pp"))
    return dict(zip(parts, squares.sqrt().tolist(), strict=True))

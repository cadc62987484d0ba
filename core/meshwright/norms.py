"""Total gradient norm and clipping over parameters with different meshes and placements.

Each gradient counts once however it is sharded: the local parts are summed over the axes that shard it and over no
other. The norms of tensors and ranks are put together in float64.
Source: the definition in torch.nn.utils.clip_grad_norm_; torch.distributed.tensor for placements.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ._compat import foreach_mul_, foreach_norm, is_sharded
from .errors import ConfigError

# What shards a gradient: the mesh and those of its mesh axes along which the tensor is split.
_Sharding = tuple[DeviceMesh, tuple[int, ...]]


def check_clip(max_norm: float | None, norm_type: float) -> None:
    """Raise ConfigError unless max_norm is None or above 0 and norm_type is above 0 (inf included)."""
    if max_norm is not None and not max_norm > 0:
        raise ConfigError(f"max_norm={max_norm} must be above 0, or None to measure without clipping.")
    if not norm_type > 0:
        raise ConfigError(f"norm_type={norm_type} must be above 0; inf is the largest absolute value.")


def total_grad_norm(gradients: Iterable[Tensor], norm_type: float = 2.0, *, wide: bool = False) -> Tensor:
    """p-norm of all gradients taken as one vector.

    Args:
        gradients: plain tensors, which count as they are, and DTensors, which count whole. All ranks of the DTensors'
            meshes pass the same ones in the same order.
        norm_type: p > 0, or inf.
        wide: sum in float64 within each tensor too, so that the norm does not depend on how tensors are cut, beyond
            its last float64 bits. Takes several times as long on float32 gradients.

    Returns:
        float64 scalar on the gradients' device, equal on all ranks. 0 without gradients.
    """
    groups: dict[_Sharding | None, list[Tensor]] = {}
    for gradient in gradients:
        groups.setdefault(_sharding(gradient), []).append(_local(gradient))
    parts = [_group_power(tensors, sharding, norm_type, wide) for sharding, tensors in groups.items()]
    if not parts:
        return torch.zeros((), dtype=torch.float64)
    stacked = torch.stack(parts)
    return stacked.max() if math.isinf(norm_type) else stacked.sum() ** (1.0 / norm_type)


def scale_to_norm(gradients: Iterable[Tensor], total_norm: Tensor, max_norm: float) -> None:
    """Multiply the gradients in place by min(1, max_norm / total_norm).

    The factor is rounded once to each gradient's dtype, so equal norms scale every layout alike. As in torch, 1e-6
    is added to the norm.
    """
    factor = (max_norm / (total_norm + 1e-6)).clamp(max=1.0)
    for tensors in _by_dtype(map(_local, gradients)):
        foreach_mul_(tensors, factor.to(tensors[0].dtype))


def _by_dtype(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return list(groups.values())


def _norms(tensors: list[Tensor], norm_type: float, wide: bool) -> list[Tensor]:
    """Norms of tensors of one dtype; half precision is summed in float32 at least."""
    dtype = torch.float64 if wide else torch.promote_types(tensors[0].dtype, torch.float32)
    return foreach_norm(tensors, norm_type, None if dtype == tensors[0].dtype else dtype)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _sharding(tensor: Tensor) -> _Sharding | None:
    if not isinstance(tensor, DTensor):
        return None
    axes = tuple(axis for axis, placement in enumerate(tensor.placements) if is_sharded(placement))
    return (tensor.device_mesh, axes) if axes else None


def _group_power(tensors: list[Tensor], sharding: _Sharding | None, norm_type: float, wide: bool) -> Tensor:
    """Sum of |g|^p, or max of |g| for inf, over all elements of one group; float64 scalar."""
    # A rank's part of an uneven shard can be empty, which has no maximum.
    norms = [norm for part in _by_dtype(t for t in tensors if t.numel()) for norm in _norms(part, norm_type, wide)]
    infinite = math.isinf(norm_type)
    if not norms:
        result = torch.zeros((), dtype=torch.float64, device=tensors[0].device)
    else:
        stacked = torch.stack([norm.double() for norm in norms])
        result = stacked.max() if infinite else (stacked**norm_type).sum()
    if sharding is not None:
        mesh, axes = sharding
        for axis in axes:
            dist.all_reduce(result, op=dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=mesh.get_group(axis))
    return result

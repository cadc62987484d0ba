"""Total gradient norm and clipping over parameters with different meshes and placements.

Each gradient counts once however it is sharded: the local parts are summed over the axes that shard it and over no
other. The norms of tensors and ranks are put together in float64.
Source: the definition in torch.nn.utils.clip_grad_norm_; torch.distributed.tensor for placements.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from .._compat.torch import foreach_mul_, foreach_norm, is_sharded
from ..base.errors import ConfigError

Groups: TypeAlias = "tuple[dist.ProcessGroup, ...]"
"""What shards a tensor: the sum over one group after the other of what the local parts give is that of the whole."""


def groups_of(tensor: Tensor) -> Groups:
    """What shards a tensor according to its placements; nothing shards a plain one."""
    if not isinstance(tensor, DTensor):
        return ()
    mesh = tensor.device_mesh
    return tuple(mesh.get_group(axis) for axis, placement in enumerate(tensor.placements) if is_sharded(placement))


def check_clip(max_norm: float | None, norm_type: float) -> None:
    """Raise ConfigError unless max_norm is None or above 0 and norm_type is above 0 (inf included)."""
    if max_norm is not None and not max_norm > 0:
        raise ConfigError(f"max_norm={max_norm} must be above 0, or None to measure without clipping.")
    if not norm_type > 0:
        raise ConfigError(f"norm_type={norm_type} must be above 0; inf is the largest absolute value.")


def total_grad_norm(
    gradients: Sequence[Tensor],
    norm_type: float = 2.0,
    *,
    wide: bool = False,
    groups: Sequence[Groups] | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """p-norm of all gradients taken as one vector.

    Args:
        gradients: plain tensors, which count as they are, and DTensors, which count whole. All ranks of the DTensors'
            meshes pass the same ones in the same order.
        norm_type: p > 0, or inf.
        groups: what shards each; None: as `groups_of`.
        device: of the result; None: that of the first gradient. Gradients may lie on several (offloaded or not): each
            is summed where it lies, on all ranks alike.
        wide: sum in float64 within each tensor too, so that the norm does not depend on how tensors are cut, beyond
            its last float64 bits. Takes several times as long on float32 gradients.

    Returns:
        float64 scalar, equal on all ranks. 0 without gradients.
    """
    together: dict[tuple[Groups, torch.device], list[Tensor]] = {}
    for gradient, sharding in zip(map(_local, gradients), groups or map(groups_of, gradients), strict=True):
        together.setdefault((sharding, gradient.device), []).append(gradient)
    parts = [_group_power(tensors, sharding, norm_type, wide) for (sharding, _), tensors in together.items()]
    if not parts:
        return torch.zeros((), dtype=torch.float64, device=device)
    stacked = torch.stack([part.to(device or parts[0].device) for part in parts])
    return stacked.max() if math.isinf(norm_type) else stacked.sum() ** (1.0 / norm_type)


def joined_norm(norms: Sequence[Tensor], norm_type: float, group: dist.ProcessGroup, device: torch.device) -> Tensor:
    """p-norm of vectors that lie on several ranks, taken as one, from the norm of each. Collective over the group.

    Args:
        norms: scalars, of this rank's vectors, at least one.
        norm_type: p > 0, or inf.
        group: each of its ranks has other vectors.
        device: of this rank.

    Returns:
        float64 scalar, equal on all ranks.
    """
    total = _power([norm.to(device) for norm in norms], (group,), norm_type, device)
    return total if math.isinf(norm_type) else total ** (1.0 / norm_type)


def each_norm(tensors: Sequence[Tensor], groups: Sequence[Groups]) -> Tensor:
    """The 2-norm of each whole tensor, float64, (tensors,), from the local parts, which lie on one device.

    Args:
        groups: what shards each.
    """
    squares = torch.stack([_local(tensor).double().square().sum() for tensor in tensors])
    for sharding in dict.fromkeys(groups):
        mine = [index for index, each in enumerate(groups) if each == sharding]
        part = squares[mine]
        for group in sharding:
            dist.all_reduce(part, group=group)
        squares[mine] = part
    return squares.sqrt()


def squares_by_part(
    parameters: Sequence[Tensor], parts: Sequence[int], count: int, groups: Sequence[Groups], *, wide: bool = False
) -> Tensor:
    """The sums of squares of the gradients of each of several parts of a model.

    Collective: for each set of groups, one all-reduce of a vector over each of them that has several ranks.

    Args:
        parameters: with their gradients, plain or DTensors; None is zeros.
        parts: the number of the part that each belongs to, below `count`.
        groups: what shards each.
        wide: as of `total_grad_norm`.

    Returns:
        float64, (count,), on the CPU, equal on all ranks of the groups.
    """
    together: dict[tuple[Groups, torch.device], list[int]] = {}
    for index, (parameter, sharding) in enumerate(zip(parameters, groups, strict=True)):
        together.setdefault((sharding, parameter.device), []).append(index)
    totals: dict[torch.device, Tensor] = {}
    for (sharding, device), mine in together.items():
        gradients = [(parts[index], grad) for index in mine if (grad := parameters[index].grad) is not None]
        vector = _squares([(part, _local(grad)) for part, grad in gradients], count, device, wide)
        for group in sharding:
            if group.size() > 1:
                dist.all_reduce(vector, group=group)
        totals[device] = totals[device] + vector if device in totals else vector
    return sum((total.cpu() for total in totals.values()), torch.zeros(count, dtype=torch.float64))


def _squares(gradients: list[tuple[int, Tensor]], count: int, device: torch.device, wide: bool) -> Tensor:
    """The sums of squares of local gradients of each part; float64, (count,)."""
    norms: list[Tensor] = []
    places: list[list[int]] = [[] for _ in range(count)]
    part_of = {id(gradient): part for part, gradient in gradients}
    for tensors in _by_kind(gradient for _, gradient in gradients if gradient.numel()):
        for tensor, norm in zip(tensors, _norms(tensors, 2.0, wide), strict=True):
            places[part_of[id(tensor)]].append(len(norms))
            norms.append(norm.to(device, torch.float64))
    # Rows of places, filled up with that of a zero: in a fixed order, and what is not finite stays in its part.
    longest = max(map(len, places), default=0)
    rows = torch.tensor([row + [len(norms)] * (longest - len(row)) for row in places], dtype=torch.int64)
    squares = torch.stack([*norms, torch.zeros((), dtype=torch.float64, device=device)]).square()
    return squares[rows.to(device)].sum(1)


def scale_to_norm(gradients: Iterable[Tensor], total_norm: Tensor, max_norm: float) -> None:
    """Multiply the gradients in place by min(1, max_norm / total_norm).

    The factor is rounded once to each gradient's dtype, so equal norms scale every layout alike. As in torch, 1e-6
    is added to the norm. It may lie elsewhere than the gradients.
    """
    factor = (max_norm / (total_norm + 1e-6)).clamp(max=1.0)
    for tensors in _by_kind(map(_local, gradients)):
        foreach_mul_(tensors, factor.to(tensors[0].device, tensors[0].dtype))


def _by_kind(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Together what one operation takes: tensors of one dtype on one device."""
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(groups.values())


def _norms(tensors: list[Tensor], norm_type: float, wide: bool) -> list[Tensor]:
    """Norms of tensors of one dtype; half precision is summed in float32 at least."""
    dtype = torch.float64 if wide else torch.promote_types(tensors[0].dtype, torch.float32)
    return foreach_norm(tensors, norm_type, None if dtype == tensors[0].dtype else dtype)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _group_power(tensors: list[Tensor], sharding: Groups, norm_type: float, wide: bool) -> Tensor:
    """Sum of |g|^p, or max of |g| for inf, over all elements of one group; float64 scalar."""
    # A rank's part of an uneven shard can be empty, which has no maximum.
    norms = [norm for part in _by_kind(t for t in tensors if t.numel()) for norm in _norms(part, norm_type, wide)]
    return _power(norms, sharding, norm_type, tensors[0].device)


def _power(norms: Sequence[Tensor], sharding: Groups, norm_type: float, device: torch.device) -> Tensor:
    """Sum of the norms' powers, or their max for inf, over this rank and all of the groups; float64 scalar."""
    infinite = math.isinf(norm_type)
    if not norms:
        result = torch.zeros((), dtype=torch.float64, device=device)
    else:
        stacked = torch.stack([norm.double() for norm in norms])
        result = stacked.max() if infinite else (stacked**norm_type).sum()
    for group in sharding:
        dist.all_reduce(result, op=dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=group)
    return result

"""Gradient norms and clipping over parameters with different meshes and placements, and gradient sums in a wider dtype.

Each gradient counts once, however it is sharded: squares of local shards are summed only over the axes that shard the
tensor. Partial norms are combined in float64. Definition: torch.nn.utils.clip_grad_norm_.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .._compat.torch import foreach_mul_, foreach_norm, is_sharded
from ..base.errors import ConfigError

ShardGroups: TypeAlias = "tuple[dist.ProcessGroup, ...]"
"""The process groups over which a tensor is sharded."""


def get_shard_groups(tensor: Tensor) -> ShardGroups:
    """Return the groups that shard a tensor according to its placements; none for a plain tensor."""
    if not isinstance(tensor, DTensor):
        return ()
    mesh = tensor.device_mesh
    return tuple(mesh.get_group(axis) for axis, placement in enumerate(tensor.placements) if is_sharded(placement))


def check_clip_options(max_norm: float | None, norm_type: float) -> None:
    """Raise ConfigError unless max_norm is None or above 0 and norm_type is above 0 (inf included)."""
    if max_norm is not None and not max_norm > 0:
        raise ConfigError(f"max_norm={max_norm} must be above 0, or None to measure without clipping.")
    if not norm_type > 0:
        raise ConfigError(f"norm_type={norm_type} must be above 0; inf is the largest absolute value.")


def compute_grad_norm(
    gradients: Sequence[Tensor],
    norm_type: float = 2.0,
    *,
    use_float64: bool = False,
    groups: Sequence[ShardGroups] | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Return the p-norm of all gradients as one vector; float64 scalar, equal on all ranks. Collective.

    Args:
        gradients: on any devices; the same ones in the same order on all ranks.
        norm_type: p > 0, or inf.
        use_float64: also sum in float64 within each tensor, so that sharding changes only the last bits; several times
            slower.
        groups: the process groups that shard each gradient; None: those of its placements.
        device: device of the result; None: that of the first gradient.
    """
    batches: dict[tuple[ShardGroups, torch.device], list[Tensor]] = {}
    for gradient, sharding in zip(map(to_local, gradients), groups or map(get_shard_groups, gradients), strict=True):
        batches.setdefault((sharding, gradient.device), []).append(gradient)
    parts = []
    for (sharding, where), tensors in batches.items():
        # Skip empty local shards, which have no maximum.
        by_dtype = _group_by_dtype_and_device(each for each in tensors if each.numel())
        norms = [norm for each in by_dtype for norm in _compute_norms(each, norm_type, use_float64)]
        parts.append(_sum_powers(norms, sharding, norm_type, where))
    if not parts:
        return torch.zeros((), dtype=torch.float64, device=device)
    stacked = torch.stack([part.to(device or parts[0].device) for part in parts])
    return stacked.max() if math.isinf(norm_type) else stacked.sum() ** (1.0 / norm_type)


def combine_norms(norms: Sequence[Tensor], norm_type: float, group: dist.ProcessGroup, device: torch.device) -> Tensor:
    """Return the p-norm of all ranks' vectors from the norms of this rank's vectors; float64 scalar. Collective."""
    total = _sum_powers([norm.to(device) for norm in norms], (group,), norm_type, device)
    return total if math.isinf(norm_type) else total ** (1.0 / norm_type)


def compute_tensor_norms(tensors: Sequence[Tensor], groups: Sequence[ShardGroups]) -> Tensor:
    """Return the 2-norm of each full tensor from local shards on one device; float64, (tensors,). Collective."""
    squares = torch.stack([to_local(tensor).double().square().sum() for tensor in tensors])
    for sharding in dict.fromkeys(groups):
        mine = [index for index, each in enumerate(groups) if each == sharding]
        part = squares[mine]
        for group in sharding:
            dist.all_reduce(part, group=group)
        squares[mine] = part
    return squares.sqrt()


def sum_squares_by_part(
    parameters: Sequence[Tensor],
    parts: Sequence[int],
    num_parts: int,
    groups: Sequence[ShardGroups],
    *,
    use_float64: bool = False,
) -> Tensor:
    """Return the sum of squared gradients of each part of a model; float64, (num_parts,), on the CPU. Collective.

    Args:
        parameters: the model's parameters; a gradient of None counts as 0.
        parts: the part of each parameter, from 0 to `num_parts` - 1.
        num_parts: number of parts.
        groups: the process groups that shard each parameter.
        use_float64: see `compute_grad_norm`.
    """
    batches: dict[tuple[ShardGroups, torch.device], list[int]] = {}
    for index, (parameter, sharding) in enumerate(zip(parameters, groups, strict=True)):
        batches.setdefault((sharding, parameter.device), []).append(index)
    totals: dict[torch.device, Tensor] = {}
    for (sharding, device), mine in batches.items():
        gradients = [(parts[index], grad) for index in mine if (grad := parameters[index].grad) is not None]
        vector = _sum_squares([(part, to_local(grad)) for part, grad in gradients], num_parts, device, use_float64)
        for group in sharding:
            if group.size() > 1:
                dist.all_reduce(vector, group=group)
        totals[device] = totals[device] + vector if device in totals else vector
    return sum((total.cpu() for total in totals.values()), torch.zeros(num_parts, dtype=torch.float64))


def _sum_squares(
    gradients: list[tuple[int, Tensor]], num_parts: int, device: torch.device, use_float64: bool
) -> Tensor:
    """Return the sums of squares of local gradients by part; float64, (num_parts,)."""
    norms: list[Tensor] = []
    norm_indices: list[list[int]] = [[] for _ in range(num_parts)]
    part_of = {id(gradient): part for part, gradient in gradients}
    for tensors in _group_by_dtype_and_device(gradient for _, gradient in gradients if gradient.numel()):
        for tensor, norm in zip(tensors, _compute_norms(tensors, 2.0, use_float64), strict=True):
            norm_indices[part_of[id(tensor)]].append(len(norms))
            norms.append(norm.to(device, torch.float64))
    # Pad each row with the index of a zero: the sums have a fixed order, and an inf or NaN stays in its part.
    longest = max(map(len, norm_indices), default=0)
    rows = torch.tensor([row + [len(norms)] * (longest - len(row)) for row in norm_indices], dtype=torch.int64)
    squares = torch.stack([*norms, torch.zeros((), dtype=torch.float64, device=device)]).square()
    return squares[rows.to(device)].sum(1)


def clip_grads_with_norm(gradients: Iterable[Tensor], total_norm: Tensor, max_norm: float) -> None:
    """Multiply the gradients in place by min(1, max_norm / (total_norm + 1e-6)), rounded once to each dtype."""
    factor = (max_norm / (total_norm + 1e-6)).clamp(max=1.0)
    for tensors in _group_by_dtype_and_device(map(to_local, gradients)):
        foreach_mul_(tensors, factor.to(tensors[0].device, tensors[0].dtype))


def _group_by_dtype_and_device(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(groups.values())


def _compute_norms(tensors: list[Tensor], norm_type: float, use_float64: bool) -> list[Tensor]:
    dtype = torch.float64 if use_float64 else torch.promote_types(tensors[0].dtype, torch.float32)
    return foreach_norm(tensors, norm_type, None if dtype == tensors[0].dtype else dtype)


def to_local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _sum_powers(norms: Sequence[Tensor], sharding: ShardGroups, norm_type: float, device: torch.device) -> Tensor:
    """Return the sum of norm**p, or the maximum for inf, over this rank's norms and the groups; float64 scalar."""
    infinite, result = math.isinf(norm_type), torch.zeros((), dtype=torch.float64, device=device)
    if norms:
        stacked = torch.stack([norm.double() for norm in norms])
        result = stacked.max() if infinite else (stacked**norm_type).sum()
    for group in sharding:
        dist.all_reduce(result, op=dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=group)
    return result


class HighPrecisionAccumulator:
    """Gradients accumulated in a wider dtype until the step ends.

    A float64 sum of a few float32 numbers is exact unless their magnitudes differ by a factor of more than about 2^25.
    So its rounding to float32 does not depend on the order of the sum, and all strategies and world sizes are bitwise
    identical.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._sums: dict[nn.Parameter, Tensor] = {}

    def accumulate(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add each gradient to its sum and zero it (DDP does not reduce a parameter whose gradient is None)."""
        for parameter in parameters:
            if parameter.grad is not None:
                wide = parameter.grad.to(self.dtype, copy=True)
                self.add_pending(parameter, wide)
                self._sums[parameter] = wide
                parameter.grad.zero_()

    def add_pending(self, parameter: nn.Parameter, total: Tensor) -> None:
        """Add the parameter's sum, if any, to `total` in place, and clear it."""
        pending = self._sums.pop(parameter, None)
        if pending is not None:
            total.add_(pending)

    def flush(self) -> None:
        """Round every sum to its parameter's dtype and make it the gradient."""
        for parameter, total in self._sums.items():
            parameter.grad = total.to(parameter.dtype)
        self._sums.clear()

"""Whole tensors out of Megatron-FSDP's shards, and back.

A unit's parameters lie one behind the other in one buffer, which is cut into equal parts, so that a rank may hold all
rows of a parameter, some, or none.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.pieces import Piece, stretch_pieces, tensor_pieces
from meshwright.state import Parts, whole_tensor

from ._compat import Slot


class Shards(Parts):
    """See `Parts`."""

    def __init__(self, slots: Mapping[nn.Parameter, Slot]) -> None:
        self._slots: Mapping[Tensor, Slot] = dict(slots)

    def whole(self, value: Tensor, parameter: Tensor) -> Tensor:
        slot = self._slots.get(parameter)
        if slot is None or not isinstance(value, DTensor):
            return whole_tensor(value)
        local = value.to_local()
        if slot.group is None:
            return local.view(parameter.shape)
        flat = local.new_zeros(parameter.shape.numel())
        flat[slot.start : slot.end] = local.flatten()
        dist.all_reduce(flat, group=slot.group)
        return flat.view(parameter.shape)

    def part(self, whole: Tensor, parameter: Tensor) -> Tensor:
        slot = self._slots.get(parameter)
        if slot is None or not isinstance(parameter, DTensor) or parameter.shape != whole.shape:
            return whole
        # A copy, so that optimizer state does not keep all of the whole tensor.
        local = whole.flatten()[slot.start : slot.end].clone().view(parameter.detach().to_local().shape)
        return like(parameter, local)

    def empty(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        if not isinstance(parameter, DTensor):
            return super().empty(parameter, dtype)
        return like(parameter, torch.empty_like(parameter.detach().to_local(), dtype=dtype))

    def pieces(self, value: Tensor, parameter: Tensor) -> list[Piece]:
        slot = self._slots.get(parameter)
        if slot is None or not isinstance(value, DTensor):
            return tensor_pieces(value)
        local = value.detach().to_local()
        if slot.group is None:
            return tensor_pieces(local.view(parameter.shape))
        return stretch_pieces(local.flatten(), slot.start, parameter.shape)


def like(parameter: DTensor, local: Tensor) -> DTensor:
    """A DTensor of the parameter's kind around another local tensor."""
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )

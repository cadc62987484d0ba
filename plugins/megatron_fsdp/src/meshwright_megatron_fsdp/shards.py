"""Whole tensors out of Megatron-FSDP's shards, and back, for states, checkpoints and norms.

The package lays a unit's parameters one after the other in one buffer and cuts it into equal parts, so that a rank may
hold all rows of a parameter, some, or none. Under tensor parallelism the buffer holds this rank's part of them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.plugin import Division, Groups, Parts, Piece, stretch_pieces, tensor_pieces, whole_tensor

from ._compat.wrapped import Slot


class Shards(Parts):
    """The parts of a sharded parameter, or of a tensor of its shape (a gradient, optimizer state); see `Parts`."""

    def __init__(
        self, slots: Mapping[nn.Parameter, Slot], divisions: Mapping[nn.Parameter, Division] | None = None
    ) -> None:
        self._slots: Mapping[Tensor, Slot] = dict(slots)
        self._divisions: Mapping[Tensor, Division] = dict(divisions or {})

    def whole(self, value: Tensor, parameter: Tensor) -> Tensor:
        slot = self._slots.get(parameter)
        if slot is None or not isinstance(value, DTensor):
            return whole_tensor(value)
        local = value.to_local()
        if slot.group is None:
            part = local.view(parameter.shape)
        else:
            flat = local.new_zeros(parameter.shape.numel())
            flat[slot.start : slot.end] = local.flatten()
            dist.all_reduce(flat, group=slot.group)
            part = flat.view(parameter.shape)
        division = self._divisions.get(parameter)
        return part if division is None else division.whole(part)

    def part(self, whole: Tensor, parameter: Tensor) -> Tensor:
        """Copy this rank's elements into a DTensor like the parameter, in `whole`'s dtype. No communication."""
        slot = self._slots.get(parameter)
        if slot is None or not isinstance(parameter, DTensor) or self.shape(parameter, parameter) != whole.shape:
            return whole
        division = self._divisions.get(parameter)
        part = whole if division is None else division.part(whole)
        # A copy, so that optimizer state does not keep all of the whole tensor.
        local = part.flatten()[slot.start : slot.end].clone().view(parameter.detach().to_local().shape)
        return like(parameter, local)

    def shape(self, value: Tensor, parameter: Tensor) -> torch.Size:
        """Return the parameter's shape before tensor parallelism, for what has its shape now."""
        division = self._divisions.get(parameter)
        return division.shape if division is not None and value.shape == parameter.shape else value.shape

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
            pieces = tensor_pieces(local.view(parameter.shape))
        else:
            pieces = stretch_pieces(local.flatten(), slot.start, parameter.shape)
        division = self._divisions.get(parameter)
        return pieces if division is None else division.pieces(pieces, parameter.shape)

    def computed_in(self, parameter: Tensor) -> torch.dtype:
        """Return the dtype in which modules compute with a parameter, whatever is trained of it."""
        slot = self._slots.get(parameter)
        return parameter.dtype if slot is None else slot.dtype

    def groups(self, parameter: Tensor) -> Groups:
        """Return the ranks that share its buffer, and those of `tp`, as far as each divides it."""
        slot, division = self._slots[parameter], self._divisions.get(parameter)
        along_dp = (slot.group,) if slot.group is not None else ()
        along_tp = (division.mesh.get_group(),) if division is not None and division.is_sharded else ()
        return along_dp + along_tp


def like(parameter: DTensor, local: Tensor) -> DTensor:
    """Make a DTensor of the parameter's mesh, placements and shape around a local part of any dtype."""
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )

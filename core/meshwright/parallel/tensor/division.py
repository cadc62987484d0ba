"""How a parameter is divided along `tp`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from ..._compat.torch import is_packed, is_sharded
from ...tensors.pieces import Piece, pieces_within
from ...tensors.state import whole_tensor


@dataclass(frozen=True)
class Division:
    """How one parameter, and what has its shape, is divided along `tp`.

    Attributes:
        mesh: the axis.
        placement: sharded, perhaps in packed parts, or replicated.
        shape: of the whole.
    """

    mesh: DeviceMesh
    placement: Placement
    shape: torch.Size

    @property
    def is_sharded(self) -> bool:
        return is_sharded(self.placement)

    def part(self, whole: Tensor) -> Tensor:
        """This rank's part, contiguous, in memory of its own; `whole` is the same on all ranks."""
        part = distribute_tensor(whole, self.mesh, [self.placement], src_data_rank=None).to_local()
        return part.clone(memory_format=torch.contiguous_format)

    def whole(self, part: Tensor) -> Tensor:
        """All ranks' parts put together, on every rank. Collective along the axis, where it is sharded."""
        return whole_tensor(self.distributed(part)) if self.is_sharded else part

    def pieces(self, pieces: list[Piece], shape: torch.Size) -> list[Piece]:
        """Rectangles of the whole, from those of this rank's part, which has this shape."""
        if not self.is_sharded:
            return pieces
        return pieces_within(pieces, self.distributed(torch.empty(shape, device="meta")))

    def distributed(self, part: Tensor) -> DTensor:
        """A DTensor around this rank's part."""
        stride = torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(part, self.mesh, [self.placement], run_check=False, shape=self.shape, stride=stride)


def packed_dim(parameter: Tensor) -> int | None:
    """The dim along which a parameter holds packed parts that are sharded each; None for all others.

    A strategy must not shard that dim further: torch puts the parts together in a wrong order.
    """
    return parameter.placements[-1].dim if is_packed(parameter) else None

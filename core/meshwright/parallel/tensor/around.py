"""What a style may ask of its surroundings."""

from __future__ import annotations

from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor, nn


class Around(Protocol):
    """The axis, and the model around the module whose forward a style runs; `TensorParallel` is one.

    Attributes:
        group, size, rank: of the axis `tp`.
        text_config: of the model.
    """

    group: dist.ProcessGroup
    size: int
    rank: int
    text_config: Any

    def copy(self, tensor: Tensor) -> Tensor:
        """A replicated tensor, for a use in parts; see `collectives.Copies`."""

    def scatters(self, module: nn.Module, output: Tensor) -> bool:
        """Whether a row-parallel layer's sum is scattered along the sequence."""

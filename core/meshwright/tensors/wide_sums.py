"""Sum gradients in a wider dtype than they come in.

A float64 sum of a few float32 numbers is exact unless they differ by more than about 2^25 in size, so its rounding
to float32 does not depend on the order of the sum: strategies and world sizes agree bit for bit, where plain float32
sums drift apart as training amplifies their last bits.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class WideSums:
    """Gradients of parameters that wait, in a wider dtype, for the rest of their step."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._sums: dict[nn.Parameter, Tensor] = {}

    def take(self, parameters: Iterable[nn.Parameter]) -> None:
        """Move each parameter's gradient into its sum and leave zeros.

        Zeros and not None: DDP reduces a parameter that the last microbatch leaves out only if it has a gradient.
        """
        for parameter in parameters:
            if parameter.grad is not None:
                wide = parameter.grad.to(self.dtype, copy=True)
                self.add_waiting(parameter, wide)
                self._sums[parameter] = wide
                parameter.grad.zero_()

    def add_waiting(self, parameter: nn.Parameter, wide: Tensor) -> None:
        """Add the parameter's sum to `wide` in place, if one waits; it waits no longer."""
        waiting = self._sums.pop(parameter, None)
        if waiting is not None:
            wide.add_(waiting)

    def give(self) -> None:
        """Round every sum to its parameter's dtype and make it the gradient."""
        for parameter, total in self._sums.items():
            parameter.grad = total.to(parameter.dtype)
        self._sums.clear()

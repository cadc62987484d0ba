"""Values that the host must know in the middle of a forward: one copy of them, which waits for the device."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("meshwright::on_host", mutates_args=())
def on_host(values: Tensor) -> Tensor:
    """A copy on the CPU, which can be read without waiting. An operator of its own, so that recomputation can hold what
    it gives, as it holds other choices that depend on the data."""
    return values.to("cpu", copy=True)


@on_host.register_fake
def _(values: Tensor) -> Tensor:
    return torch.empty_like(values, device="cpu")

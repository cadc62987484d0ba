"""Names of torch that differ between supported versions; `tests/contract/test_compat.py` has a canary for each."""

from __future__ import annotations

import inspect

from torch.nn.parallel import DistributedDataParallel

SHIMS = ("broadcast_buffers_kwargs",)
"""Functions that torch 2.13 does not need; see `meshwright._compat.torch`."""


def broadcast_buffers_kwargs(enabled: bool) -> dict[str, bool]:
    """Return DistributedDataParallel's argument for broadcasting rank 0's buffers before each forward.

    `broadcast_buffers` also controls the broadcast at construction, which `init_sync=False` disables.
    """
    parameters = inspect.signature(DistributedDataParallel).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in parameters else "broadcast_buffers": enabled}

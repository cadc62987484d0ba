"""The only place in this package that touches version-dependent names of torch; each has a canary test."""

from __future__ import annotations

from torch.distributed.fsdp import FSDPModule


def reduce_unused_parameters(unit: FSDPModule) -> bool:
    """Let a unit's reduce-scatter take zeros for parameters without gradient, so that ranks may use different ones.

    torch 2.13 has the call, torch 2.11 (by reading) has not.

    Returns:
        Whether this torch can.
    """
    switch = getattr(unit, "set_reduce_scatter_unused_params", None)
    if switch is None:
        return False
    switch(True, recurse=False)
    return True

"""The only place in this package that touches version-dependent names of torch; each has a canary test."""

from __future__ import annotations

from torch.distributed.fsdp import FSDPModule

from meshwright.errors import ConfigError


def reduce_unused_parameters(unit: FSDPModule) -> None:
    """Let a unit's reduce-scatter take zeros for parameters without gradient, so that ranks may use different ones.

    torch 2.13 has the call, torch 2.11 (by reading) has not.

    Raises:
        ConfigError: this torch has no such call.
    """
    switch = getattr(unit, "set_reduce_scatter_unused_params", None)
    if switch is None:
        raise ConfigError("reduce_unused_parameters=true needs torch 2.13 or later. Leave it out, or update torch.")
    switch(True, recurse=False)

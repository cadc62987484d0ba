"""Options that have nothing to act on, since the axis that they are about has one rank, or in the whole strategy.

They are no error: the same run file is debugged on one rank, and a config of another framework is taken as it is. By
definition nothing of them is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch.distributed as dist
from pydantic import BaseModel

from ..files.terminal import warn
from ..mesh.mesh import Mesh

_OPTIONS_OF: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"tp": ("sequence_parallel", "tp_plan", "enable_async_tensor_parallel"), "cp": ("cp_attention",)}
)


def tell_idle_options(config: BaseModel, mesh: Mesh, never: Mapping[str, str] = MappingProxyType({})) -> None:
    """Warn on the first rank of options that act on nothing.

    Args:
        config: options; those along `tp` and `cp` act on nothing while the axis has one rank.
        mesh: with the ranks along each axis.
        never: options that act on nothing on any mesh, and why.
    """
    fields = type(config).model_fields
    for name, reason in never.items():
        if getattr(config, name) != fields[name].default and dist.get_rank() == 0:
            warn(f"{name}={getattr(config, name)} acts on nothing here: {reason}.", stacklevel=2)
    for axis, options in _OPTIONS_OF.items():
        if getattr(mesh.degrees, axis) > 1:
            continue
        idle = [name for name in options if name in fields and getattr(config, name) != fields[name].default]
        if idle and dist.get_rank() == 0:
            told = " and ".join(f"{name}={getattr(config, name)}" for name in idle)
            verb = "acts" if len(idle) == 1 else "act"
            warn(f"{told} {verb} on nothing here: {axis}_size is 1.", stacklevel=2)

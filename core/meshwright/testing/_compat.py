"""The only place in the testing kit that touches private or version-dependent names of torch.

tests/test_compat.py holds a canary for each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group

# A private module, though torch's own documentation teaches the class; there is no other way to see every operation.
# Tried with torch 2.11 (by reading) and 2.13.
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TorchDispatchMode", "bound_arguments", "process_group", "unwraps_itself"]


def bound_arguments(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by the names of the operation's schema; those left out are missing.

    Private because torch has no public call for an operation's schema. Tried with torch 2.11 (by reading) and 2.13.
    """
    names = [argument.name for argument in operation._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def process_group(value: Any) -> dist.ProcessGroup:
    """The group of a collective from what its operation carries: the group's name, or the group in TorchScript's box.

    Private because collectives below the Python functions name their group in these two ways only.
    Tried with torch 2.11 (by reading) and 2.13.
    """
    if isinstance(value, dist.ProcessGroup):
        return value
    return _resolve_process_group(value) if isinstance(value, str) else dist.ProcessGroup.unbox(value)


def unwraps_itself(kind: type) -> bool:
    """Whether a tensor class wraps plain tensors and runs operations on them, as DTensor does.

    A mode that returns NotImplemented for it is asked again for each operation on what is inside.
    Tried with torch 2.11 (by reading) and 2.13.
    """
    return hasattr(kind, "__tensor_flatten__")

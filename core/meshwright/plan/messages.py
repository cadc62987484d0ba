"""What a collective over real values gives in a world in which every rank has what this one has.

Parts of all ranks are copies of this one's. A sum is left as this rank's own share: what is summed here beside what the
world itself adds up are notes of what is wrong, and of what was used.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..tensors.ops import tensors_in
from ..testing._compat import bound_arguments, process_group

NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_GIVEN = ("input_tensors", "input_tensor", "input", "inputs", "tensors", "tensor")
_TAKEN = ("output_tensors", "output_tensor", "output", "outputs")


@torch.no_grad()
def received(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an operation of torch.distributed, over a group that sends nothing, and write what it would receive."""
    arguments = bound_arguments(operation, args, kwargs)
    result = operation(*args, **kwargs)
    group = arguments.get("process_group", arguments.get("group_name"))
    if group is None:
        return result
    given = _side(arguments, _GIVEN)
    taken = _side(arguments, _TAKEN) or list(tensors_in(result))
    if not given:
        return result
    mine = torch.cat([each.reshape(-1) for each in given])
    if "all_to_all" in str(operation) or "alltoall" in str(operation):
        # What is for this rank, from each.
        members = process_group(group)
        part = mine.numel() // members.size()
        mine = mine[members.rank() * part : (members.rank() + 1) * part]
    for other in taken:
        if 0 < mine.numel() <= other.numel():
            other.copy_(mine.repeat(other.numel() // mine.numel()).view_as(other))
        elif other.numel():
            # A part of a sum.
            start = process_group(group).rank() * other.numel()
            other.copy_(mine[start : start + other.numel()].view_as(other))
    return result


def _side(arguments: dict[str, Any], names: tuple[str, ...]) -> list[Tensor]:
    return next((list(tensors_in(arguments[name])) for name in names if name in arguments), [])

"""Carry whole states along the pipeline tensor by tensor, so that no rank holds more at once than it keeps.

The rest of a state (names, settings of the optimizer, where tensors go) goes ahead as one small object. What a state
means is not known here; see `whole_state`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class _Gap:
    """The place of a tensor."""

    shape: torch.Size
    dtype: torch.dtype


Path = tuple[Any, ...]


def gathered(state: Any, group: dist.ProcessGroup, device: torch.device) -> list[Any]:
    """The states of all ranks of a group, on the CPU of its first rank; nothing elsewhere. Collective.

    Args:
        state: mappings, lists and tuples of tensors, of any shapes and dtypes, and plain values.
        device: of this rank.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    outlines: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object(_mapped(state, _gap), outlines, group=group, group_dst=0)
    if outlines is None:
        _mapped(state, lambda path, tensor: dist.send(tensor.to(device).contiguous(), group=group, group_dst=0))
        return []

    def receive(source: int) -> Callable[[Path, Any], Tensor]:
        def fill(path: Path, gap: _Gap) -> Tensor:
            tensor = torch.empty(gap.shape, dtype=gap.dtype, device=device)
            dist.recv(tensor, group=group, group_src=source)
            return tensor.cpu()

        return fill

    return [state, *(_mapped(outlines[source], receive(source)) for source in range(1, size))]


def broadcast(state: Any, group: dist.ProcessGroup, device: torch.device, *, wanted: Callable[[Path], bool]) -> Any:
    """The state of the first rank of a group, on the CPU of all. Collective.

    Args:
        state: as of `gathered`; of the first rank.
        device: of this rank.
        wanted: whether this rank keeps the tensor at a place; None stands for those that it does not.
    """
    is_first = dist.get_rank(group) == 0
    box = [_mapped(state, _gap) if is_first else None]
    dist.broadcast_object_list(box, group=group, group_src=0)

    def fill(path: Path, given: Any) -> Tensor | None:
        tensor = torch.empty(given.shape, dtype=given.dtype, device=device)
        if is_first:
            tensor.copy_(given)
        dist.broadcast(tensor, group=group, group_src=0)
        return given if is_first else tensor.cpu() if wanted(path) else None

    return _mapped(state if is_first else box[0], fill)


def _gap(path: Path, tensor: Tensor) -> _Gap:
    return _Gap(tensor.shape, tensor.dtype)


def _mapped(value: Any, change: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """The value with each tensor, or place of one, changed; in one order everywhere."""
    if isinstance(value, (Tensor, _Gap)):
        return change(path, value)
    if isinstance(value, Mapping):
        return {key: _mapped(each, change, (*path, key)) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_mapped(each, change, (*path, index)) for index, each in enumerate(value))
    return value

"""Private names of torch that planning needs: tensors without memory, and process groups that send nothing.

Both are what torch tests itself with; it has no public ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.distributed._functional_collectives import AsyncCollectiveTensor

DEPENDS_ON_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
"""Raised where shapes do not tell what an operator gives."""


class Fakes:
    """Makes tensors that have a shape, a dtype and a device, but no memory; real ones may be among what it is given.

    The mode is called, and not entered: a mode that is at work gives no memory to storages either, not even to those
    that messages of Python objects are made of.
    """

    def __init__(self) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)

    def computed(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an operator gives, without memory."""
        try:
            return self._mode.dispatch(func, types, args, kwargs)
        finally:
            # It keeps weak references to what it makes, and `nn.Module.to` refuses tensors that have some.
            self._mode.fake_tensor_converter.tensor_memo.clear()

    def device(self, tensor: Tensor) -> torch.device:
        """Where a tensor would lie."""
        return tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device

    def knows(self, tensor: Tensor) -> bool:
        """Whether a tensor is one of these."""
        return isinstance(tensor, FakeTensor) and tensor.fake_mode is self._mode


def handed_on(func: Any, given: Sequence[Tensor]) -> Tensor | None:
    """What stands for the result of a collective until it is there, and what is there then: no memory of its own.

    None for other operators. Their answers for shapes alone are new tensors, which plain code never sees.
    """
    name = str(func)
    if name == "_c10d_functional._wrap_tensor_autograd.default":
        return AsyncCollectiveTensor(given[0])
    return given[0] if name == "_c10d_functional.wait_tensor.default" else None


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is of torch's own class or a parameter, and no other subclass; without memory, too."""
    return type(tensor) in (Tensor, nn.Parameter, FakeTensor)


def is_on_meta(tensor: Tensor) -> bool:
    """As `tensor.is_meta`, which asks all dispatch modes where the tensor has no memory."""
    return tensor.fake_device.type == "meta" if isinstance(tensor, FakeTensor) else tensor.is_meta


def is_asking_for_shapes() -> bool:
    """Whether torch, in the middle of a program, looks for the shapes that an operator would give, as DTensor does for
    those that it first sees.
    """
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def start_fake_group(rank: int, size: int) -> None:
    """Join a process group of any size that sends nothing: what is received is what was there before."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore(), timeout=timedelta(seconds=600))


def in_backward() -> bool:
    """Whether autograd is running a backward in this thread."""
    return torch._C._current_graph_task_id() != -1

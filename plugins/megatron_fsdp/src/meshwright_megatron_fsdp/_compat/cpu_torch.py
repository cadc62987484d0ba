"""What the package's modules see of torch: that of a CPU, and one more dtype.

[Note: torch on a CPU] The package calls torch.cuda for streams and events and to name its device. On a CPU mesh the
name `torch` inside four of its modules stands for an object that answers these from torch.cpu and hands everything else
on to torch. torch itself, and everyone else's view of it, stays as it is, and the name is put back when the last
manager goes. On a GPU nothing is replaced.

There, collectives that the package does not wait for at once are done when they return. It drops the tensors that it
gives them while they run, which streams of a GPU allow for; gloo works in a thread of its own, and torch knows of a
race between that and Python's deallocation (pytorch/pytorch#75529).
"""

from __future__ import annotations

import functools
import logging
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _coalescing_manager as torch_coalescing_manager

from .package import submodule

_PATCHED = ("megatron_fsdp", "param_and_grad_buffer", "uneven_dtensor", "utils")

_log = logging.getLogger(__name__)


class _CpuStream(torch.cpu.Stream):
    """torch.cpu's stream, whose `record_event` returns None where the package waits for an event."""

    def record_event(self, event: Any = None) -> Any:
        return torch.cpu.Event()


class _CpuAsCuda:
    """What the package calls of torch.cuda, on a CPU. Other names are missing, so that a new call shows.

    Args:
        device: what `current_device` answers; the package uses it as a device in one module, and to format one in
            the others.
    """

    Stream = _CpuStream
    stream = staticmethod(torch.cpu.stream)

    def __init__(self, device: str | int) -> None:
        self._device = device

    def current_device(self) -> str | int:
        return self._device

    def current_stream(self) -> _CpuStream:
        return _CpuStream()

    def is_available(self) -> bool:
        return False

    def empty_cache(self) -> None:
        """There is no cache on a CPU."""


class _Torch(types.ModuleType):
    """`torch`, or a part of it, with some names replaced."""

    def __init__(self, inner: Any, **replaced: Any) -> None:
        super().__init__(inner.__name__)
        self.__dict__.update(replaced)
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_inner"], name)


class _Done:
    """The handle of a collective that is done."""

    def wait(self) -> bool:
        return True


def _waited_for(collective: Callable[..., Any]) -> Callable[..., _Done | None]:
    """A collective of torch.distributed that is done when it returns; `async_op` chooses what it returns alone."""

    @functools.wraps(collective)
    def call(*args: Any, async_op: bool = False, **options: Any) -> _Done | None:
        collective(*args, **options)
        return _Done() if async_op else None

    return call


@contextmanager
def _coalesced(*args: Any, async_ops: bool = False, **options: Any) -> Iterator[_Done]:
    """In place of torch's `_coalescing_manager`: on a CPU each collective is done when it returns.

    gloo takes tensors of one dtype together, where NCCL takes those of any.
    """
    yield _Done()


_ASYNCHRONOUS = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")
_COALESCING = "_coalescing_manager"
"""The name under which a module of the package has torch's."""


def _cpu_torch(module: str) -> _Torch:
    def device(name: Any) -> torch.device:
        return torch.device("cpu" if str(name).startswith("cuda") else name)

    def tensor(*args: Any, **options: Any) -> Tensor:
        made = torch.tensor(*args, **options)
        made.cuda = lambda: made
        return made

    if module == "megatron_fsdp.utils":
        return _Torch(torch, cuda=_CpuAsCuda("cpu"))
    distributed = _Torch(dist, **{name: _waited_for(getattr(dist, name)) for name in _ASYNCHRONOUS})
    return _Torch(torch, cuda=_CpuAsCuda(0), device=device, tensor=tensor, distributed=distributed)


_cpu_users = 0


def hold_cpu_torch(owner: object) -> weakref.finalize[..., Any]:
    """Keep [Note: torch on a CPU] in place as long as `owner` lives, or until what is returned is called.

    Args:
        owner: what needs it; it takes weak references.

    Returns:
        A function without arguments, which lets go; called again, it does nothing.

    Raises:
        StrategyError: as `package`.
    """
    global _cpu_users
    if _cpu_users == 0:
        _log.info("Megatron-FSDP runs on the CPU: what its modules call of torch.cuda is answered by torch.cpu.")
        for module in map(submodule, _PATCHED):
            _replace(module, _cpu_torch(module.__name__), _coalesced)
    _cpu_users += 1
    return weakref.finalize(owner, _release_cpu_torch)


def _release_cpu_torch() -> None:
    global _cpu_users
    _cpu_users -= 1
    if _cpu_users == 0:
        for module in map(submodule, _PATCHED):
            _replace(module, torch, torch_coalescing_manager)


def _replace(module: Any, torch_: Any, coalescing_manager: Any) -> None:
    module.torch = torch_
    if hasattr(module, _COALESCING):
        setattr(module, _COALESCING, coalescing_manager)


@contextmanager
def float64_buffers() -> Iterator[None]:
    """While a model is wrapped: buffers of gradients for float64, too.

    The package counts their sizes in a table of float32, float16 and bfloat16 and fails with a KeyError for others, so
    float16 stands for float64 there. Such a model has no parameters in float16, as `precision.find_dtypes` sees to.
    """
    module = submodule("param_and_grad_buffer")
    before = module.torch
    module.torch = _Torch(before, float16=torch.float64)
    try:
        yield
    finally:
        module.torch = before

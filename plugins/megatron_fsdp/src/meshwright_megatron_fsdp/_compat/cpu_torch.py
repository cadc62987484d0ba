"""Replace `torch` in the package's modules: on a CPU, and for float64 buffers.

[Note: torch on a CPU] The package calls torch.cuda for streams, events and its device. On a CPU mesh, the name `torch`
in four of its modules is bound to a proxy that redirects these calls to torch.cpu and all others to torch. The name is
restored when the last manager is freed. On a GPU nothing is replaced.

The proxy makes the package's asynchronous collectives synchronous. The package drops their tensors while they run,
which is safe with a GPU's streams. Gloo runs in a separate thread, which races with deallocation
(pytorch/pytorch#75529).
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

from .package import import_submodule

_PATCHED_MODULES = ("megatron_fsdp", "param_and_grad_buffer", "uneven_dtensor", "utils")

_log = logging.getLogger(__name__)


class _CpuStream(torch.cpu.Stream):
    """torch.cpu's stream, but `record_event` returns an event; torch.cpu returns None, and the package needs one."""

    def record_event(self, event: Any = None) -> Any:
        return torch.cpu.Event()


class _CpuCudaModule:
    """The names of torch.cuda that the package uses. Others are missing, so that any new call fails."""

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
        """Do nothing: a CPU has no cache."""


class _TorchProxy(types.ModuleType):
    """`torch`, or one of its modules, with some names replaced."""

    def __init__(self, module: Any, **overrides: Any) -> None:
        super().__init__(module.__name__)
        self.__dict__.update(overrides)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)


_COMPLETED_WORK = types.SimpleNamespace(wait=lambda: True)
"""The handle of a completed collective."""


def _make_synchronous(collective: Callable[..., Any]) -> Callable[..., Any]:

    @functools.wraps(collective)
    def call(*args: Any, async_op: bool = False, **options: Any) -> Any:
        collective(*args, **options)
        return _COMPLETED_WORK if async_op else None

    return call


@contextmanager
def _skip_coalescing(*args: Any, async_ops: bool = False, **options: Any) -> Iterator[Any]:
    """Replacement of torch's `_coalescing_manager`, within which gloo accepts only tensors of one dtype."""
    yield _COMPLETED_WORK


_ASYNC_COLLECTIVES = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")
_COALESCING_MANAGER = "_coalescing_manager"
"""The name of torch's coalescing manager in a module of the package."""


def _build_cpu_torch(module: str) -> _TorchProxy:
    def device(name: Any) -> torch.device:
        return torch.device("cpu" if str(name).startswith("cuda") else name)

    def tensor(*args: Any, **options: Any) -> Tensor:
        result = torch.tensor(*args, **options)
        result.cuda = lambda: result
        return result

    if module == "megatron_fsdp.utils":
        return _TorchProxy(torch, cuda=_CpuCudaModule("cpu"))
    distributed = _TorchProxy(dist, **{name: _make_synchronous(getattr(dist, name)) for name in _ASYNC_COLLECTIVES})
    return _TorchProxy(torch, cuda=_CpuCudaModule(0), device=device, tensor=tensor, distributed=distributed)


_num_cpu_users = 0


def use_cpu_torch(owner: object) -> weakref.finalize[..., Any]:
    """Apply [Note: torch on a CPU] while `owner` lives. Calling the returned finalizer ends it earlier."""
    global _num_cpu_users
    if _num_cpu_users == 0:
        _log.info("Megatron-FSDP runs on the CPU: what its modules call of torch.cuda is answered by torch.cpu.")
        for module in map(import_submodule, _PATCHED_MODULES):
            _patch_module(module, _build_cpu_torch(module.__name__), _skip_coalescing)
    _num_cpu_users += 1
    return weakref.finalize(owner, _release_cpu_torch)


def _release_cpu_torch() -> None:
    global _num_cpu_users
    _num_cpu_users -= 1
    if _num_cpu_users == 0:
        for module in map(import_submodule, _PATCHED_MODULES):
            _patch_module(module, torch, torch_coalescing_manager)


def _patch_module(module: Any, torch_: Any, coalescing_manager: Any) -> None:
    module.torch = torch_
    if hasattr(module, _COALESCING_MANAGER):
        setattr(module, _COALESCING_MANAGER, coalescing_manager)


@contextmanager
def allow_float64_buffers() -> Iterator[None]:
    """Allow the package to create float64 gradient buffers while it wraps a model.

    Its table of buffer sizes lacks float64, so float16 is replaced by float64; see
    `units.build_mixed_precision_policy`.
    """
    module = import_submodule("param_and_grad_buffer")
    original = module.torch
    module.torch = _TorchProxy(original, float16=torch.float64)
    try:
        yield
    finally:
        module.torch = original

"""Replace `torch` inside the package's modules: on a CPU, and for float64 buffers.

[Note: torch on a CPU] The package calls torch.cuda for streams, events and its device. On a CPU mesh the name `torch`
inside four of its modules means an object that answers these calls from torch.cpu and passes everything else on to
torch. The name is restored when the last manager goes. On a GPU nothing is replaced.

Asynchronous collectives of the package end before they return there. It drops their tensors while they run, which a
GPU's streams allow; gloo works in a thread of its own, which races with deallocation (pytorch/pytorch#75529).
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
    """torch.cpu's stream, whose `record_event` returns None where the package waits for an event."""

    def record_event(self, event: Any = None) -> Any:
        return torch.cpu.Event()


class _CpuCudaModule:
    """The names of torch.cuda that the package uses; others are missing, so that a new call fails."""

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


class _TorchProxy(types.ModuleType):
    """`torch`, or a part of it, with some names replaced."""

    def __init__(self, module: Any, **overrides: Any) -> None:
        super().__init__(module.__name__)
        self.__dict__.update(overrides)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)


_COMPLETED_WORK = types.SimpleNamespace(wait=lambda: True)
"""The handle of a collective that is done."""


def _make_synchronous(collective: Callable[..., Any]) -> Callable[..., Any]:

    @functools.wraps(collective)
    def call(*args: Any, async_op: bool = False, **options: Any) -> Any:
        collective(*args, **options)
        return _COMPLETED_WORK if async_op else None

    return call


@contextmanager
def _skip_coalescing(*args: Any, async_ops: bool = False, **options: Any) -> Iterator[Any]:
    """Replace torch's `_coalescing_manager`, under which gloo takes tensors of one dtype only."""
    yield _COMPLETED_WORK


_ASYNC_COLLECTIVES = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")
_COALESCING_MANAGER = "_coalescing_manager"
"""The name under which a module of the package has torch's."""


def _build_cpu_torch(module: str) -> _TorchProxy:
    def device(name: Any) -> torch.device:
        return torch.device("cpu" if str(name).startswith("cuda") else name)

    def tensor(*args: Any, **options: Any) -> Tensor:
        made = torch.tensor(*args, **options)
        made.cuda = lambda: made
        return made

    if module == "megatron_fsdp.utils":
        return _TorchProxy(torch, cuda=_CpuCudaModule("cpu"))
    distributed = _TorchProxy(dist, **{name: _make_synchronous(getattr(dist, name)) for name in _ASYNC_COLLECTIVES})
    return _TorchProxy(torch, cuda=_CpuCudaModule(0), device=device, tensor=tensor, distributed=distributed)


_num_cpu_users = 0


def use_cpu_torch(owner: object) -> weakref.finalize[..., Any]:
    """Apply [Note: torch on a CPU] while `owner` lives; what is returned ends it earlier."""
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
    """Let the package make float64 gradient buffers while it wraps a model.

    Its table of buffer sizes has no float64, so float16 means float64 there; see `units.build_mixed_precision_policy`.
    """
    module = import_submodule("param_and_grad_buffer")
    before = module.torch
    module.torch = _TorchProxy(before, float16=torch.float64)
    try:
        yield
    finally:
        module.torch = before

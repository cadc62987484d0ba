"""A pretended accelerator beside the CPU, for tests that find where the two are mixed.

Tensors of the accelerator are CPU tensors that are written down as its own: their `.device` is ACCELERATOR, and an
operation that takes them together with tensors of the CPU fails where CUDA's would. CUDA takes a CPU tensor of no
dimensions in operations that treat every element alike, into which it may not write; copies between devices; and
indices on the CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from meshwright._compat.torch import TorchDispatchMode, get_mutated_arguments, get_storage_key
from meshwright.tensors.ops import list_tensors

CPU = torch.device("cpu")
ACCELERATOR = torch.device("ipu", 0)
"""Of a type that torch knows and has no kernels for; unlike CUDA, its first use starts nothing."""

_aten = torch.ops.aten
_COPIES = {_aten.copy_.default, _aten._to_copy.default, _aten.set_.source_Tensor}
_TAKE_CPU_INDICES = {_aten.index.Tensor, _aten.index_put_.default, _aten.index_put.default}


class MixedDevicesError(RuntimeError): ...


class FakeAccelerator:
    """A context manager in which ACCELERATOR exists."""

    def __init__(self) -> None:
        self.collectives: list[tuple[str, str]] = []  # Of this rank: the operator and the device of its tensors
        # Where the running call makes its tensors; None: where those are that it takes.
        self.creation_device: torch.device | None = CPU
        # With the storages, whose keys are free again when they are gone.
        self._accelerator_storages: dict[int, Any] = {}
        self._modes = contextlib.ExitStack()

    def __enter__(self) -> FakeAccelerator:
        self._modes.enter_context(_TorchCallMode(self))
        self._modes.enter_context(_DispatchCheckMode(self))
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._modes.__exit__(None, None, None)

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """A time in which there is the CPU only."""
        self.__exit__()
        self._modes = contextlib.ExitStack()
        try:
            yield
        finally:
            self.__enter__()

    def mark_on_accelerator(self, tensor: Tensor) -> Tensor:
        """Write a tensor down as one of the accelerator."""
        key, storage = get_storage_key(tensor)
        self._accelerator_storages[key] = storage
        return tensor

    def device_of_tensor(self, tensor: Tensor) -> torch.device:
        return ACCELERATOR if get_storage_key(tensor)[0] in self._accelerator_storages else CPU

    def device_of_any(self, tensors: Iterable[Tensor]) -> torch.device:
        """ACCELERATOR if one of them is there."""
        return next((ACCELERATOR for tensor in tensors if self.device_of_tensor(tensor) == ACCELERATOR), CPU)

    @contextlib.contextmanager
    def set_creation_device(self, device: torch.device | None) -> Iterator[None]:
        before, self.creation_device = self.creation_device, device
        try:
            yield
        finally:
            self.creation_device = before


class _TorchCallMode(TorchFunctionMode):
    """What Python asks of torch: `tensor.device` is where it is taken to be, and `to` goes from there."""

    def __init__(self, devices: FakeAccelerator) -> None:
        super().__init__()
        self._devices = devices

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == _DEVICE_OF:
            return self._devices.device_of_tensor(args[0])
        if func in (torch.Tensor.to, torch.Tensor.cpu):
            return self._move(func, *args, **kwargs)
        if func in (torch.Tensor.backward, torch.autograd.backward):
            first, second = args[0], kwargs.get("gradient", kwargs.get("grad_tensors", (*args, None)[1]))
            return self._backward(*([first], [second]) if isinstance(first, Tensor) else (first, second))
        asked = kwargs.get("device")
        taken = list(list_tensors((args, kwargs)))
        where = torch.device(asked) if asked is not None else self._devices.device_of_any(taken)
        with self._devices.set_creation_device(where if asked is not None or not taken else None):
            return func(*args, **kwargs)

    def _move(self, func: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        named = kwargs.pop("device", None)
        wanted = [CPU] if func == torch.Tensor.cpu else [each for each in (named, *args) if _is_device(each)]
        target = torch.device(wanted[0]) if wanted else self._devices.device_of_tensor(tensor)
        if self._devices.device_of_tensor(tensor).type != target.type:
            with self._devices.set_creation_device(target):
                tensor = _aten._to_copy(tensor, device=target)
        # It is there now: nothing to be done, except for dtype and the like.
        rest = [CPU if _is_device(each) else each for each in args]
        with self._devices.set_creation_device(None):
            return tensor.to(*rest, **kwargs) if rest or kwargs else tensor

    def _backward(self, tensors: Sequence[Tensor], given: Any) -> None:
        given = [None] * len(tensors) if given is None else given
        pairs = zip(tensors, (given,) if isinstance(given, Tensor) else given, strict=True)
        gradients = [torch.ones_like(tensor) if gradient is None else gradient for tensor, gradient in pairs]
        # As torch does it, but that this mode sees what hooks call. The engine itself makes tensors for gradients.
        with self, self._devices.set_creation_device(None):
            torch.autograd.graph._engine_run_backward(
                tuple(tensors), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True
            )


def _is_device(value: Any) -> bool:
    return isinstance(value, (str, torch.device))


_DEVICE_OF = torch.Tensor.device.__get__  # type: ignore[attr-defined]


class _DispatchCheckMode(TorchDispatchMode):
    """Refuses to mix devices, and runs what is for the accelerator on the CPU."""

    def __init__(self, devices: FakeAccelerator) -> None:
        super().__init__()
        self._devices = devices

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        taken = list(list_tensors((args, kwargs)))
        self._check(func, taken, args, kwargs)
        asked = kwargs.get("device")
        if asked is not None:
            kwargs["device"] = CPU
        result = func(*args, **kwargs)
        if self._is_made_there(asked, taken):
            known = {get_storage_key(tensor)[0] for tensor in taken}
            for tensor in list_tensors(result):
                if get_storage_key(tensor)[0] not in known:
                    self._devices.mark_on_accelerator(tensor)
        return result

    def _is_made_there(self, asked: torch.device | None, taken: list[Tensor]) -> bool:
        if asked is not None and asked.type == ACCELERATOR.type:
            return True
        # Torch itself names the device of a tensor that it has, which is the CPU, when it makes another beside it.
        if asked is not None and self._devices.creation_device == CPU:
            return False
        return self._devices.device_of_any(taken) == ACCELERATOR or (not taken and self._devices.creation_device != CPU)

    def _check(self, func: Any, taken: list[Tensor], args: Any, kwargs: Any) -> None:
        places = {self._devices.device_of_tensor(tensor) for tensor in taken}
        if func.namespace in ("c10d", "_c10d_functional") and taken:
            self._devices.collectives.append((str(func), " and ".join(sorted(map(str, places)))))
        if len(places) < 2 or func in _COPIES:
            return
        if func in _TAKE_CPU_INDICES:
            both = [tensor for tensor in (args[0], *args[2:]) if isinstance(tensor, Tensor)]
            if len({self._devices.device_of_tensor(tensor) for tensor in both}) == 1:
                return
        on_cpu = [tensor for tensor in taken if self._devices.device_of_tensor(tensor) == CPU]
        written = [args[at] if isinstance(at, int) else kwargs[at] for at in get_mutated_arguments(func)]
        is_written = any(self._devices.device_of_tensor(tensor) == CPU for tensor in list_tensors(written))
        if torch.Tag.pointwise in func.tags and not is_written and not str(func).startswith("aten._foreach"):
            on_cpu = [tensor for tensor in on_cpu if tensor.dim()]
        if on_cpu:
            shapes = ", ".join(
                f"{tuple(tensor.shape)} on {self._devices.device_of_tensor(tensor).type}" for tensor in taken
            )
            raise MixedDevicesError(f"{func} takes tensors of both devices: {shapes}")

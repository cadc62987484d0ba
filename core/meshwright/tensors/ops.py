"""Small tensor operations that several packages use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from .._compat.torch import all_gather_single as all_gather_single
from .._compat.torch import foreach_copy_, get_own_parameters
from .._compat.torch import reduce_scatter_single as reduce_scatter_single

copy_all = foreach_copy_
"""Copy each source tensor into its target, in few kernels: (targets, sources)."""
_LEAF_TYPES = (int, float, complex, str, type(None), torch.dtype, torch.device)
_REAL_COMPUTE: ContextVar[bool] = ContextVar("has_values", default=False)
_FINGERPRINT_CHUNK = 1 << 20
_INTEGER_DTYPES = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


# -- devices


def is_accelerator(device: torch.device) -> bool:
    """Return whether a device is an available accelerator, whose memory and time torch can measure."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator is not None and accelerator.type == device.type


def make_event_recorder(device: torch.device) -> Callable[[], torch.Event] | None:
    """Return a function that records a timing event on the device's current stream; None without an accelerator."""
    if not is_accelerator(device):
        return None

    def record() -> torch.Event:
        event = torch.Event(device, enable_timing=True)
        event.record()
        return event

    return record


def is_on_meta(tensor: Tensor) -> bool:
    """Return whether a tensor is on the meta device. Unlike `has_meta_tensors`, ignores dispatch modes."""
    return tensor.device.type == "meta"


@torch.library.custom_op("meshwright::on_host", mutates_args=())
def copy_to_host(values: Tensor) -> Tensor:
    """Copy values to the CPU and wait for them. A custom operator, so that activation checkpointing can save it."""
    return values.to("cpu", copy=True)


@copy_to_host.register_fake
def _(values: Tensor) -> Tensor:
    return torch.empty_like(values, device="cpu")


# -- temporary replacements


@contextmanager
def temporary_parameters(parameters: Iterable[tuple[nn.Module, str, Tensor | None]]) -> Iterator[None]:
    """Replace each module's own parameter of that name by the tensor, within the context."""
    replacements = [(get_own_parameters(module), name, tensor) for module, name, tensor in parameters]
    before = [own[name] for own, name, _ in replacements]
    try:
        for own, name, tensor in replacements:
            own[name] = tensor
        yield
    finally:
        for (own, name, _), tensor in zip(replacements, before, strict=True):
            own[name] = tensor


@contextmanager
def temporary_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute within the context."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


# -- nested values


def list_tensors(value: Any) -> list[Tensor]:
    """Return the tensors in nested lists, tuples and mappings, in order."""
    tensors: list[Tensor] = []
    _collect_tensors((value,), tensors)
    return tensors


def _collect_tensors(values: Iterable[Any], found: list[Tensor]) -> None:
    for each in values:
        if isinstance(each, Tensor):
            found.append(each)
        elif isinstance(each, (list, tuple)):
            _collect_tensors(each, found)
        elif not isinstance(each, _LEAF_TYPES) and isinstance(each, Mapping):
            _collect_tensors(each.values(), found)


# -- real values in a simulated run


@contextmanager
def real_compute() -> Iterator[None]:
    """Compute with real values within the context, although the run is only simulated; see `World.is_real`.

    Values received from other ranks are undefined.
    """
    token = _REAL_COMPUTE.set(True)
    try:
        yield
    finally:
        _REAL_COMPUTE.reset(token)


def is_real_compute() -> bool:
    """Return whether the caller is inside `real_compute`."""
    return _REAL_COMPUTE.get()


# -- fingerprints


def fingerprint(tensor: Tensor) -> Tensor:
    """Return a 64-bit hash of a tensor's bits, in element order; int64, a scalar on its device.

    Each element, read as an integer, is multiplied by an odd number that depends on its position, and the products
    are summed modulo 2**64. A flipped bit changes the sum by a power of two times an odd number, which is never 0;
    the order in which a device adds does not matter.
    """
    flat = tensor.detach().contiguous().view(-1)
    words = (
        flat.view(_INTEGER_DTYPES[flat.element_size()])
        if flat.element_size() in _INTEGER_DTYPES
        else flat.view(torch.uint8)
    )
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    odd = 2 * torch.arange(min(words.numel(), _FINGERPRINT_CHUNK), dtype=torch.int64, device=tensor.device) + 1
    for start in range(0, words.numel(), _FINGERPRINT_CHUNK):
        part = words[start : start + _FINGERPRINT_CHUNK].to(torch.int64)
        total += (part * (odd[: part.numel()] + 2 * start)).sum()
    return total

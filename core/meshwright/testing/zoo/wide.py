"""Compute the float32 parts of a float64 model in float64.

Many architectures cast norms, routers or states to float32 inside, whatever the model's dtype. A gradient summed there
over tokens depends on how they are split into microbatches, by 1e-9: as much as some real bugs. Here those casts
become casts to float64, so that only the order of float64 sums is left.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


class _Float64(TorchFunctionMode):
    """Every call of torch that names float32 names float64 instead."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        return func(*map(_widen, args), **{name: _widen(value) for name, value in (kwargs or {}).items()})


def _widen(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


class _Computation:
    """Hold the mode from the start of the outermost forward to its end."""

    def __init__(self) -> None:
        self._depth = 0
        self._mode = _Float64()

    def wrapped(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def wide(*args: Any, **kwargs: Any) -> Any:
            if self._depth:
                return forward(*args, **kwargs)
            default_dtype = torch.get_default_dtype()
            torch.set_default_dtype(torch.float64)
            self._depth += 1
            try:
                with self._mode:
                    return forward(*args, **kwargs)
            finally:
                self._depth -= 1
                torch.set_default_dtype(default_dtype)

        return wide


def compute_in_float64(model: nn.Module) -> None:
    """Make all parameters float64, and all forwards compute in float64.

    Every module's own forward is wrapped, not only the model's, because activation checkpointing calls those of blocks
    again in the backward, past their hooks.
    """
    computation = _Computation()
    for module in model.modules():
        # A method, so that a copy of the module gets one of its own.
        module.forward = MethodType(computation.wrapped(type(module).forward), module)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(torch.float64)

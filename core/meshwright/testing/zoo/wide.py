"""Compute the float32 parts of a float64 model in float64.

Many architectures cast norms, routers or states to float32 inside, whatever the model's dtype. A gradient summed there
over tokens depends on how they are split into microbatches, by 1e-9: as much as some real bugs. Here those casts
become casts to float64, so that only the order of float64 sums is left.
"""

from __future__ import annotations

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


class _Hooks:
    """Hold the mode from the start of the outermost module to its end."""

    def __init__(self) -> None:
        self.depth = 0
        self.mode = _Float64()
        self.default_dtype = torch.float32

    def enter(self, module: nn.Module, args: Any) -> None:
        if self.depth == 0:
            self.default_dtype = torch.get_default_dtype()
            torch.set_default_dtype(torch.float64)
            self.mode.__enter__()
        self.depth += 1

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.depth -= 1
        if self.depth == 0:
            self.mode.__exit__(None, None, None)
            torch.set_default_dtype(self.default_dtype)


def compute_in_float64(model: nn.Module) -> None:
    """Make all parameters float64, and all forwards compute in float64.

    The hooks are on every module, not only on the model, because activation checkpointing calls blocks again in the
    backward.
    """
    hooks = _Hooks()
    for module in model.modules():
        module.register_forward_pre_hook(hooks.enter)
        module.register_forward_hook(hooks.leave, always_call=True)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(torch.float64)

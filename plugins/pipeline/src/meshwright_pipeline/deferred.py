"""Split a backward into gradients of activations, which come first, and gradients of weights, which can wait.

Linear layers, where nearly all of the work on weights is, put theirs off while `WeightGradients.collecting` is open;
all else is computed at once. Weights of compiled blocks, and under autocast, are not put off.
Source: Qi et al. 2023, arXiv:2401.10241.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class WeightGradients:
    """What the linear layers of one stage have put off."""

    def __init__(self) -> None:
        self._collected: list[Callable[[], None]] | None = None

    @contextmanager
    def collecting(self) -> Iterator[list[Callable[[], None]]]:
        """Around a backward: yields a list of what is to be called for the rest of it."""
        collected: list[Callable[[], None]] = []
        self._collected = collected
        try:
            yield collected
        finally:
            self._collected = None

    def put_off(self, work: Callable[[], None]) -> bool:
        """Keep `work` for later; False if it must be done now."""
        if self._collected is None:
            return False
        self._collected.append(work)
        return True

    def watch(self, module: nn.Module) -> None:
        """Let the linear layers of a module put off their weights; in place."""
        for each in module.modules():
            # Subclasses may compute something else.
            if type(each) is nn.Linear:
                each.forward = _forward(each, self)


def _forward(layer: nn.Linear, store: WeightGradients) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        plain = type(layer.weight) in (Tensor, nn.Parameter)
        if not (plain and torch.is_grad_enabled() and x.requires_grad and layer.weight.requires_grad):
            return functional.linear(x, layer.weight, layer.bias)
        if torch.is_autocast_enabled(x.device.type) or torch.compiler.is_compiling():
            return functional.linear(x, layer.weight, layer.bias)
        out: Tensor = _Linear.apply(x, layer.weight, layer.bias, store)
        return out

    return forward


class _Linear(torch.autograd.Function):
    """A linear layer whose backward asks the store what to do with its weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, store: WeightGradients) -> Tensor:
        ctx.save_for_backward(x, weight)
        # Recomputation saves copies, and it is these that the gradient belongs to.
        ctx.weights, ctx.store = (weight, bias), store
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        needed = ctx.needs_input_grad
        grad_x = grad @ weight if needed[0] else None
        own_weight, own_bias = ctx.weights

        def of_weight() -> Tensor:
            return grad.flatten(0, -2).t() @ x.flatten(0, -2)

        def of_bias() -> Tensor:
            return grad.flatten(0, -2).sum(0)

        def later() -> None:
            # Through autograd, so that whoever watches these gradients sees them.
            if needed[1]:
                torch.autograd.backward(own_weight, of_weight())
            if needed[2]:
                torch.autograd.backward(own_bias, of_bias())

        if ctx.store.put_off(later):
            return grad_x, None, None, None
        return grad_x, of_weight() if needed[1] else None, of_bias() if needed[2] else None, None

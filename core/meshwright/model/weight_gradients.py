"""Split a backward into gradients of activations, which come first, and gradients of weights, which can wait.

Linear layers, where nearly all of the work on weights is, put theirs off while a `WeightGradients` that watches them
collects; all else is computed at once. Weights of compiled blocks, and under autocast, are not put off.
Source: Qi et al. 2023, arXiv:2401.10241.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .._compat.planning import is_plain
from .forward_order import Layer, put_around


class WeightGradients:
    """What the linear layers of a module have put off.

    Attributes:
        collected: where it is kept, to be called later and once, in order; None: nothing is put off.
    """

    def __init__(self) -> None:
        self.collected: list[Callable[[], None]] | None = None

    @contextmanager
    def collecting(self) -> Iterator[list[Callable[[], None]]]:
        """Around a backward: yields a list of what is to be called for the rest of it."""
        collected: list[Callable[[], None]] = []
        self.collected = collected
        try:
            yield collected
        finally:
            self.collected = None

    def watch(self, module: nn.Module) -> None:
        """Let the linear layers of a module put off their weights; in place.

        Where others watch a layer, too, the first that collects gets its work.
        """
        for each in module.modules():
            # Subclasses, and layers whose forward was replaced, may compute something else.
            if type(each) is nn.Linear:
                if "forward" not in vars(each):
                    put_around(each, Layer.WEIGHTS, lambda _, layer=each: _Forward(layer))  # type: ignore[misc]
                if isinstance(each.forward, _Forward):
                    each.forward.stores.append(self)


class _Forward:
    """The forward of a linear layer that is watched."""

    def __init__(self, layer: nn.Linear) -> None:
        self._layer = layer
        self.stores: list[WeightGradients] = []

    def __call__(self, x: Tensor) -> Tensor:
        layer = self._layer
        if not (is_plain(layer.weight) and torch.is_grad_enabled() and x.requires_grad and layer.weight.requires_grad):
            return functional.linear(x, layer.weight, layer.bias)
        if torch.is_autocast_enabled(x.device.type) or torch.compiler.is_compiling():
            return functional.linear(x, layer.weight, layer.bias)
        out: Tensor = _Linear.apply(x, layer.weight, layer.bias, self.put_off)
        return out

    def put_off(self, work: Callable[[], None]) -> bool:
        """Keep `work` for later; False if it must be done now."""
        collected = next((store.collected for store in self.stores if store.collected is not None), None)
        if collected is None:
            return False
        collected.append(work)
        return True


class _Linear(torch.autograd.Function):
    """A linear layer whose backward asks whether the work on its weights can be put off."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, put_off: Callable[[Callable[[], None]], bool]
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        # Recomputation saves copies, and it is these that the gradient belongs to.
        ctx.weights, ctx.put_off = (weight, bias), put_off
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

        if ctx.put_off(later):
            return grad_x, None, None, None
        return grad_x, of_weight() if needed[1] else None, of_bias() if needed[2] else None, None

"""Wrappers of a module's forward, and their order.

[Note: order of forwards] The first wrapper is innermost. From the model's own code outwards:

- STAGE: ends a forward where the next pipeline stage begins;
- LOSS: lets the head defer its logits, and the model return their loss;
- WEIGHTS: lets linear layers defer their weight gradients;
- EXPERTS: sends tokens to the ranks of their experts and back;
- TENSOR: communication around the layers of a tensor-parallel plan, and local tensors as parameters;
- RECOMPUTED: blocks with activation checkpointing, which compilation must see;
- COMPILED: blocks that are compiled, which must not see DTensors;
- LOCAL: local tensors again, around compiled blocks;
- STRATEGY: wrappers of a strategy (autocast); its hooks that gather parameters run around all others.

A wrapper that is added too late would be in the wrong order, and is rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .._compat.torch import is_plain_tensor
from ..base.errors import StrategyError

ForwardMethod = Callable[..., Any]
_OUTERMOST_ATTRIBUTE = "meshwright_outermost_layer"

WrapOrder = IntEnum("WrapOrder", "STAGE LOSS WEIGHTS EXPERTS TENSOR RECOMPUTED COMPILED LOCAL STRATEGY", start=0)
"""Wrappers of a forward, from innermost to outermost; see [Note: order of forwards]."""


def wrap_forward(module: nn.Module, order: WrapOrder, wrap: Callable[[ForwardMethod], ForwardMethod]) -> None:
    """Replace the forward of a module instance by the result of `wrap`. Wrappers of the same order may nest.

    Raises:
        StrategyError: the forward already has a wrapper of a later order.
    """
    outermost = getattr(module, _OUTERMOST_ATTRIBUTE, order)
    if order < outermost:
        raise StrategyError(
            f"{type(module).__name__} is {WrapOrder(outermost).name.lower()} already, and {order.name.lower()} comes "
            f"inside of that. Do it before: the order is {', '.join(each.name.lower() for each in WrapOrder)}."
        )
    module.forward = wrap(module.forward)
    setattr(module, _OUTERMOST_ATTRIBUTE, order)


class DeferredWeightGradients:
    """Weight gradients that linear layers defer while `collecting`, so that activation gradients are computed first.

    Everything else is computed immediately, including weight gradients of compiled blocks and under autocast.
    Source: Qi et al. 2023, arXiv:2401.10241.
    """

    def __init__(self) -> None:
        self.collected: list[Callable[[], None]] | None = None

    @contextmanager
    def collecting(self) -> Iterator[list[Callable[[], None]]]:
        """Defer the weight gradients of a backward.

        Yields the list of functions that compute them. Call each once, in order.
        """
        self.collected = []
        try:
            yield self.collected
        finally:
            self.collected = None

    def attach(self, module: nn.Module) -> None:
        """Let the linear layers of a module defer, in place.

        If several objects are attached to a layer, the first that is collecting gets its gradients.
        """
        for each in module.modules():
            # Subclasses and layers with a replaced forward may compute something else.
            if type(each) is nn.Linear:
                if "forward" not in vars(each):
                    wrap_forward(each, WrapOrder.WEIGHTS, lambda _, layer=each: _DeferringForward(layer))  # type: ignore[misc]
                if isinstance(each.forward, _DeferringForward):
                    each.forward.collectors.append(self)


class _DeferringForward:
    def __init__(self, layer: nn.Linear) -> None:
        self._layer = layer
        self.collectors: list[DeferredWeightGradients] = []

    def __call__(self, x: Tensor) -> Tensor:
        weight, bias = self._layer.weight, self._layer.bias
        can_defer = is_plain_tensor(weight) and torch.is_grad_enabled() and x.requires_grad and weight.requires_grad
        if not can_defer or torch.is_autocast_enabled(x.device.type) or torch.compiler.is_compiling():
            return functional.linear(x, weight, bias)
        out: Tensor = _DeferringLinear.apply(x, weight, bias, self.defer)
        return out

    def defer(self, work: Callable[[], None]) -> bool:
        """Defer `work`; return False if no attached object is collecting."""
        collected = next((store.collected for store in self.collectors if store.collected is not None), None)
        if collected is None:
            return False
        collected.append(work)
        return True


class _DeferringLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, put_off: Callable[[Callable[[], None]], bool]
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        # Recomputation saves copies, but the gradients belong to these.
        ctx.weights, ctx.put_off = (weight, bias), put_off
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        grad_x = grad @ weight if needs_x else None

        def compute_gradients() -> tuple[Tensor | None, Tensor | None]:
            grad_weight = grad.flatten(0, -2).t() @ x.flatten(0, -2) if needs_weight else None
            return grad_weight, grad.flatten(0, -2).sum(0) if needs_bias else None

        def run_deferred() -> None:
            # Through autograd, so that hooks on these gradients run.
            for parameter, gradient in zip(ctx.weights, compute_gradients(), strict=True):
                if gradient is not None:
                    torch.autograd.backward(parameter, gradient)

        return (grad_x, None, None, None) if ctx.put_off(run_deferred) else (grad_x, *compute_gradients(), None)

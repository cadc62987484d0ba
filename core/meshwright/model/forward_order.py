"""Who may wrap the forward of a module, and in which order.

[Note: order of forwards] What is wrapped first runs innermost. From the model's own code outwards:

- STAGE: ends a forward where the next stage of a pipeline begins;
- LOSS: lets the head put off its logits, and the model return their loss;
- WEIGHTS: lets linear layers put off the gradients of their weights;
- EXPERTS: sends tokens to the ranks of their experts and back;
- TENSOR: communication around the layers of a tensor-parallel plan, and local tensors in place of parameters;
- RECOMPUTED: blocks whose activations are computed again, which compilation must see;
- COMPILED: blocks that are compiled, which must not see DTensors;
- LOCAL: local tensors again, around what is compiled;
- STRATEGY: what a strategy puts around the whole (autocast); its hooks for gathering run around all of it.

A layer that comes too late would run inside out, and is refused.
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
"""Wrappers of a forward, from the inside outwards; see [Note: order of forwards]."""


def wrap_forward(module: nn.Module, order: WrapOrder, wrap: Callable[[ForwardMethod], ForwardMethod]) -> None:
    """Replace the forward of one module by what `wrap` makes of it, on the instance. Wrappers of one layer may nest.

    Raises:
        StrategyError: a later layer wraps it already.
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
    """Weight gradients that the linear layers of a module defer while `collecting`, so that activations' come first.

    All else is computed at once, and so are weights of compiled blocks and under autocast.
    Source: Qi et al. 2023, arXiv:2401.10241.
    """

    def __init__(self) -> None:
        self.collected: list[Callable[[], None]] | None = None

    @contextmanager
    def collecting(self) -> Iterator[list[Callable[[], None]]]:
        """Defer weight gradients in a backward; yields the list of functions to call, once and in order, for them."""
        self.collected = []
        try:
            yield self.collected
        finally:
            self.collected = None

    def attach(self, module: nn.Module) -> None:
        """Let the linear layers of a module defer their weights, in place. Of several watchers the first collects."""
        for each in module.modules():
            # Subclasses, and layers whose forward was replaced, may compute something else.
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
        can_wait = is_plain_tensor(weight) and torch.is_grad_enabled() and x.requires_grad and weight.requires_grad
        if not can_wait or torch.is_autocast_enabled(x.device.type) or torch.compiler.is_compiling():
            return functional.linear(x, weight, bias)
        out: Tensor = _DeferringLinear.apply(x, weight, bias, self.defer)
        return out

    def defer(self, work: Callable[[], None]) -> bool:
        """Keep `work` for later; False if it must be done now."""
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
        # Recomputation saves copies, and it is these that the gradient belongs to.
        ctx.weights, ctx.put_off = (weight, bias), put_off
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        grad_x = grad @ weight if needs_x else None

        def gradients() -> tuple[Tensor | None, Tensor | None]:
            of_weight = grad.flatten(0, -2).t() @ x.flatten(0, -2) if needs_weight else None
            return of_weight, grad.flatten(0, -2).sum(0) if needs_bias else None

        def later() -> None:
            # Through autograd, so that hooks on these gradients run.
            for parameter, gradient in zip(ctx.weights, gradients(), strict=True):
                if gradient is not None:
                    torch.autograd.backward(parameter, gradient)

        return (grad_x, None, None, None) if ctx.put_off(later) else (grad_x, *gradients(), None)

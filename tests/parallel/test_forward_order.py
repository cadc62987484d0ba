"""What is put around a module's forward runs from the inside outwards in one order, and is refused in any other."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from meshwright import ModelLayout, StrategyError
from meshwright.model.forward_order import DeferredWeightGradients, WrapOrder, wrap_forward
from meshwright.model.recompute import checkpoint_blocks, compile_blocks
from meshwright.strategy.registry import model_layout
from meshwright_testing.models import build_tiny_model


def _noting(name, calls):
    def make(forward):
        def around(*args):
            calls.append(name)
            return forward(*args)

        return around

    return make


def test_layers_run_from_the_outermost_inwards():
    calls, layer = [], nn.Linear(2, 2)
    for each in (WrapOrder.STAGE, WrapOrder.TENSOR, WrapOrder.TENSOR, WrapOrder.STRATEGY):
        wrap_forward(layer, each, _noting(each.name, calls))
    layer(torch.ones(1, 2))
    assert calls == ["STRATEGY", "TENSOR", "TENSOR", "STAGE"]


@pytest.mark.parametrize(("first", "second"), [(b, a) for a in WrapOrder for b in WrapOrder if a < b])
def test_a_layer_that_belongs_further_inside_comes_too_late(first, second):
    calls, layer = [], nn.Linear(2, 2)
    wrap_forward(layer, first, _noting("first", calls))
    with pytest.raises(StrategyError, match=f"Linear is {first.name.lower()} already, and {second.name.lower()} comes"):
        wrap_forward(layer, second, _noting("second", calls))
    layer(torch.ones(1, 2))
    assert calls == ["first"]


def test_blocks_that_are_compiled_are_not_recomputed_afterwards():
    model = build_tiny_model(seed=0)
    layout: ModelLayout = model_layout(model)
    compile_blocks(model, layout, backend="eager")
    with pytest.raises(StrategyError, match=r"is compiled already, and recomputed comes inside of that\. Do it before"):
        checkpoint_blocks(model, layout, "full")


def test_two_watchers_share_a_linear_layer():
    layer, first, second = nn.Linear(2, 2), DeferredWeightGradients(), DeferredWeightGradients()
    for each in (first, second):
        each.attach(layer)
    out = layer(torch.ones(1, 2, requires_grad=True))
    with second.collecting() as rest:
        out.sum().backward()
    assert layer.weight.grad is None
    for each in rest:
        each()
    assert layer.weight.grad.tolist() == [[1.0, 1.0], [1.0, 1.0]]

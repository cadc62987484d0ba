"""Who may put something around the forward of a module, and in which order.

[Note: order of forwards] What is put around first runs innermost. From the model's own code outwards:

- STAGE: ends a forward where the next stage of a pipeline begins;
- LOSS: lets the head put off its logits, and the model return their loss;
- WEIGHTS: lets linear layers put off the gradients of their weights;
- EXPERTS: sends tokens to the ranks of their experts and back;
- TENSOR: communication around the layers of a tensor-parallel plan, and local tensors in place of parameters;
- RECOMPUTED: blocks whose activations are computed again, which compilation must see;
- COMPILED: blocks that are compiled, which must not see DTensors;
- LOCAL: so local tensors again, around what is compiled;
- STRATEGY: what a strategy puts around the whole (autocast); its hooks for gathering run around all of it.

What a module does not get is left out. A layer that comes too late would run inside out, and is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any

from torch import nn

from ..base.errors import StrategyError

ForwardMethod = Callable[..., Any]
_MARK = "meshwright_outermost_layer"


class Layer(IntEnum):
    """What is put around a forward, from the inside outwards; see [Note: order of forwards]."""

    STAGE = 0
    LOSS = 1
    WEIGHTS = 2
    EXPERTS = 3
    TENSOR = 4
    RECOMPUTED = 5
    COMPILED = 6
    LOCAL = 7
    STRATEGY = 8


def put_around(module: nn.Module, layer: Layer, make: Callable[[ForwardMethod], ForwardMethod]) -> None:
    """Replace the forward of one module by what `make` makes of it; on the instance.

    Several of one layer may follow each other.

    Raises:
        StrategyError: something of a later layer is around it already.
    """
    outermost = getattr(module, _MARK, layer)
    if layer < outermost:
        raise StrategyError(
            f"{type(module).__name__} is {Layer(outermost).name.lower()} already, and {layer.name.lower()} comes "
            f"inside of that. Do it before: the order is {', '.join(each.name.lower() for each in Layer)}."
        )
    module.forward = make(module.forward)
    setattr(module, _MARK, layer)

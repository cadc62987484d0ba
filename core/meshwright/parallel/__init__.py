"""The axes that any strategy may claim: tensor, context and expert parallelism."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from ..model.forward_order import Layer, put_around

Forward = Callable[..., Any]


def wrap_forward(module: nn.Module, layer: Layer, run: Forward, is_active: Callable[[], bool]) -> None:
    """Replace `module.forward` by `run(forward, ...)` while `is_active()`; see `meshwright.model.forward_order`."""

    def around(forward: Forward) -> Forward:
        @functools.wraps(forward)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return run(forward, *args, **kwargs) if is_active() else forward(*args, **kwargs)

        return wrapped

    put_around(module, layer, around)

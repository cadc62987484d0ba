"""Put a context around the forward of a model, whoever calls it.

Which context, and in which order, is the manager's affair.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from meshwright.model.forward_order import Layer, put_around


def surround_forward(model: nn.Module, around: Callable[[Mapping[str, Any]], AbstractContextManager[Any]]) -> None:
    """Run the model's own forward within a context, inside of the hooks that sharding has put on the model.

    Args:
        model: whose `forward` is replaced on the instance.
        around: makes the context for a call, of its arguments by name.
    """

    def surrounding(forward: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(forward)

        @functools.wraps(forward)
        def surrounded(*args: Any, **kwargs: Any) -> Any:
            arguments = signature.bind_partial(*args).arguments if args else {}
            with around({**arguments, **kwargs}):
                return forward(*args, **kwargs)

        return surrounded

    put_around(model, Layer.STRATEGY, surrounding)

"""The axes that any strategy may claim: tensor, context and expert parallelism."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..base.errors import MeshwrightError, ModelError
from ..model.forward_order import WrapOrder, wrap_forward

ForwardMethod = Callable[..., Any]


def wrap_forward_if(module: nn.Module, order: WrapOrder, wrapper: ForwardMethod, is_active: Callable[[], bool]) -> None:
    """Replace `module.forward` by `run(forward, ...)` while `is_active()`; see `meshwright.model.forward_order`."""

    def around(forward: ForwardMethod) -> ForwardMethod:
        @functools.wraps(forward)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return wrapper(forward, *args, **kwargs) if is_active() else forward(*args, **kwargs)

        return wrapped

    wrap_forward(module, order, around)


@contextmanager
def reraise_as_model_error(format_message: Callable[[str], str], *, is_first: bool) -> Iterator[None]:
    """Raise what a model's own code fails with in its first forward as a ModelError, of which `format_message` makes the text."""
    try:
        yield
    except (torch.OutOfMemoryError, dist.DistError, MeshwrightError):
        raise
    except RuntimeError as error:
        if not is_first:
            raise
        raise ModelError(format_message(str(error).strip().splitlines()[0])) from error

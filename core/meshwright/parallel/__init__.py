"""Parallelism axes that any strategy may use: tensor, context and expert parallelism."""

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
    """Replace `module.forward` by `wrapper(forward, ...)` while `is_active()`; see `meshwright.model.forward_order`."""

    def make_wrapped(forward: ForwardMethod) -> ForwardMethod:
        @functools.wraps(forward)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return wrapper(forward, *args, **kwargs) if is_active() else forward(*args, **kwargs)

        return wrapped

    wrap_forward(module, order, make_wrapped)


@contextmanager
def reraise_as_model_error(format_message: Callable[[str], str], *, is_first: bool) -> Iterator[None]:
    """Convert a RuntimeError in a model's first forward to a ModelError with the text `format_message(first_line)`."""
    try:
        yield
    except (torch.OutOfMemoryError, dist.DistError, MeshwrightError):
        raise
    except RuntimeError as error:
        if not is_first:
            raise
        raise ModelError(format_message(str(error).strip().splitlines()[0])) from error

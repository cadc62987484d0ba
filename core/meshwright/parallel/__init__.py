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


@contextmanager
def explained(tell: Callable[[str], str], *, is_first: bool) -> Iterator[None]:
    """Raise what a model's own code fails with in its first forward as a ModelError, of which `tell` makes the text."""
    try:
        yield
    except (torch.OutOfMemoryError, dist.DistError, MeshwrightError):
        raise
    except RuntimeError as error:
        if not is_first:
            raise
        raise ModelError(tell(str(error).strip().splitlines()[0])) from error

"""Look at what the first backward of a loop by hand leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from ..._compat.torch import after_backward


def until_done(module: nn.Module, check: Callable[[], bool]) -> None:
    """Call `check` at the end of each backward through a module's output, until it answers True; it may raise."""

    def at_end() -> None:
        # Once for each output.
        if handles and check():
            handles.pop().remove()

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        values = output.values() if isinstance(output, Mapping) else output
        for each in values if not isinstance(values, Tensor) else (values,):
            if isinstance(each, Tensor) and each.requires_grad:
                each.register_hook(lambda grad: after_backward(at_end))

    handles = [module.register_forward_hook(hook)]


class Inside(AbstractContextManager[None]):
    """A context that knows whether it has been entered."""

    is_inside = False

    def __enter__(self) -> None:
        self.is_inside = True

    def __exit__(self, *_: object) -> None:
        self.is_inside = False

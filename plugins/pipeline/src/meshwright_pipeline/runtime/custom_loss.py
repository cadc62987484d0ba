"""A loss of the user's own: found by its name, and made an objective.

[Note: loss_fn] It is called as `loss_fn(logits, targets)` for each microbatch of the pipeline, with logits (B, S, V),
float32 or float64, and targets (B, S), int64, where targets[b, s] is the token that logits[b, s] predict, or -100 where
there is none: the shift by one has happened. It returns the sum over tokens, a scalar with a gradient, which is divided
by the number of tokens of the step. Like any objective it is tried before the first step, and refused if it is no sum.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshwright.plugin import IGNORE_INDEX, ConfigError, Objective, Outputs, import_class_from_path

_TORCH_LOSS_BASE = torch.nn.MSELoss.__mro__[1]
"""Of torch's losses; it has no public name."""


class LogitsObjective:
    """The objective that a `loss_fn` stands for."""

    name, input_kind = "loss_fn", "outputs"

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._loss, self._is_checked = loss, False

    def __call__(self, outputs: Outputs, columns: Any) -> Tensor:
        if not self._is_checked:
            masked = float(self._loss(outputs.logits.detach(), torch.full_like(outputs.targets, IGNORE_INDEX)))
            if masked != 0:
                raise ConfigError(
                    f"loss_fn gives {masked:g} where all targets are masked with {IGNORE_INDEX}. It must return the "
                    f"sum over all others."
                )
            self._is_checked = True
        return self._loss(outputs.logits, outputs.targets)


def build_loss_objective(value: Any) -> Objective | None:
    """The objective of `loss_fn`: a callable, a function by its path, or an object of a class by its path."""
    if value is None:
        return None
    loss: Any = value
    try:
        if isinstance(value, str):
            loss = import_class_from_path(value, kind=("function", "class"), base=_TORCH_LOSS_BASE)
            loss = loss() if inspect.isclass(loss) else loss
        return LogitsObjective(loss)
    except TypeError as error:
        raise ConfigError(
            f"loss_fn={value!r} cannot be made without arguments: {error}. Name a function, or give a callable."
        ) from None

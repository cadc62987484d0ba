"""Convert a custom loss, the option `loss_fn`, to an objective.

[Note: loss_fn] It is called as `loss_fn(logits, targets)` for each microbatch of the pipeline, with logits (B, S, V),
float32 or float64, and targets (B, S), int64. targets[b, s] is the token that logits[b, s] predict, or -100 if there is
none: the targets are already shifted by one. It returns the sum over tokens, a scalar with a gradient, which is divided
by the number of tokens of the step. Like any objective, it is probed before the first step, and rejected if it is not a
sum.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshwright.plugin import IGNORE_INDEX, ConfigError, Objective, Outputs, import_class_from_path

_TORCH_LOSS_BASE = torch.nn.MSELoss.__mro__[1]
"""Base class of torch's losses, which has no public name."""


class LogitsObjective:
    """Objective that calls a `loss_fn`."""

    name, input_kind = "loss_fn", "outputs"

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._loss, self._is_checked = loss, False

    def __call__(self, outputs: Outputs, columns: Any) -> Tensor:
        if not self._is_checked:
            masked = float(self._loss(outputs.logits.detach(), torch.full_like(outputs.targets, IGNORE_INDEX)))
            if masked != 0:
                raise ConfigError(
                    f"loss_fn returns {masked:g} although all targets are masked with {IGNORE_INDEX}. It must return "
                    f"the sum over all other targets."
                )
            self._is_checked = True
        return self._loss(outputs.logits, outputs.targets)


def build_loss_objective(value: Any) -> Objective | None:
    """Return the objective of `loss_fn`: a callable, or the import path of a function or of a loss class."""
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
            f"loss_fn={value!r} cannot be instantiated without arguments: {error}. Name a function, or pass a callable."
        ) from None

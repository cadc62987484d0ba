"""A loss of the user's own, on the last stage: found by its name, and tried. Where it is called is in `stage`.

[Note: loss_fn] It is called as `loss_fn(logits, targets)` for each microbatch of the pipeline, with logits (B, S, V)
and targets (B, S), int64, where targets[b, s] is the token that logits[b, s] predict, or -100 where there is none: the
shift by one has happened. It returns the sum over tokens, a scalar with a gradient, which is divided by the number of
tokens of the step. A mean over a microbatch would weigh tokens by how many others are in it, and is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshwright.base.errors import ConfigError
from meshwright.files.class_paths import import_class_from_path
from meshwright.strategy.contract import IGNORED_LABEL

LossFn = Callable[[Tensor, Tensor], Tensor]


def loss_of(value: Any) -> LossFn | None:
    """The callable that `loss_fn` stands for: itself, a function by its path, or an object of a class by its path.

    Raises:
        ConfigError: it cannot be imported, or the class needs arguments.
    """
    if not isinstance(value, str):
        given: LossFn | None = value
        return given
    found = import_class_from_path(value, kind=("function", "class"))
    try:
        loss: Any = found() if inspect.isclass(found) else found
    except TypeError as error:
        raise ConfigError(
            f"loss_fn={value!r} cannot be made without arguments: {error}. Name a function, or give a callable."
        ) from None
    made: LossFn = loss
    return made


def check_loss(loss: LossFn, *, vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
    """Try a loss on random logits (2, 5, V) and targets (2, 5); see [Note: loss_fn].

    Args:
        vocab_size: V.
        dtype: of the logits.

    Raises:
        ConfigError: it is no sum over tokens.
    """
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, vocab_size, generator=generator).to(device, dtype).requires_grad_()
    targets = torch.randint(vocab_size, (2, 5), generator=generator).to(device)
    targets[0, 2:] = IGNORED_LABEL
    try:
        both = loss(logits, targets)
        parts = [loss(logits[index : index + 1], targets[index : index + 1]) for index in range(2)]
        masked = loss(logits, torch.full_like(targets, IGNORED_LABEL))
    except Exception as error:
        raise _refused(f"fails on logits {tuple(logits.shape)} and targets {tuple(targets.shape)}: {error}") from error
    if not all(isinstance(each, Tensor) and each.dim() == 0 for each in (both, masked, *parts)):
        raise _refused("returns no scalar")
    if not both.requires_grad:
        raise _refused("returns a value without a gradient")
    if float(masked) != 0:
        raise _refused(f"gives {float(masked):g} where all targets are masked with {IGNORED_LABEL}")
    if not torch.allclose(both.double(), sum(parts, torch.zeros_like(both)).double(), rtol=1e-3, atol=0):
        values = " and ".join(f"{float(part):g}" for part in parts)
        raise _refused(f"gives {values} for two sequences, and {float(both):g} for both together")


def _refused(text: str) -> ConfigError:
    return ConfigError(
        f"loss_fn {text}. It must return the sum over all targets that are not {IGNORED_LABEL} of logits (B, S, V) and "
        f"targets (B, S), which are shifted already."
    )

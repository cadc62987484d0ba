"""Flip bits of what a rank holds, as a cosmic ray does."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.checkpoint.training_state import flatten_state
from meshwright.strategy.contract import StrategyManager


def flip_tensor_bit(tensor: Tensor, bit: int = 3) -> None:
    """Flip one bit of the last element, in place."""
    words = tensor.detach().view(-1)[-1:].view(torch.uint8)
    words[0] ^= 1 << bit


def find_first_state_tensor(manager: StrategyManager, prefix: str) -> Tensor:
    """The first piece of state on this rank whose name begins so."""
    named = flatten_state(manager.sharded_state()).items()
    held = [p.tensor for name, each in named if name.startswith(prefix) for p in each.chunks if p.tensor.numel()]
    return next(each for each in held if each.is_floating_point())


def find_first_gradient(manager: StrategyManager) -> Tensor | None:
    """The first gradient on this rank that the optimizer would step; None: there is none now."""
    gradients = [p.grad for group in manager.optimizer.param_groups for p in group["params"]]
    whole = [each.to_local() if isinstance(each, DTensor) else each for each in gradients if each is not None]
    return next((each for each in whole if each.numel()), None)

"""Norms of gradients by block, for the conformance suite: what each rank is told, and that asking changes nothing."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..strategy.contract import StrategyManager
from .case import Case, Outcome
from .parity import build_manager, full_weights, train_steps
from .pool import pool


@dataclass(frozen=True)
class FoundNorms:
    """What a rank saw.

    Attributes:
        outcome: of the training.
        by_block: of each step, what `gradient_norms` has told.
    """

    outcome: Outcome
    by_block: list[dict[str, float]]

    def apart(self, expected: FoundNorms) -> float:
        """How far norms are from those of another rank, as a part of these; inf where blocks have other names, or
        come in another order."""
        pairs = list(zip(self.by_block, expected.by_block, strict=True))
        if any(list(mine) != list(theirs) for mine, theirs in pairs):
            return math.inf
        return max(_part(abs(mine[name] - norm), norm) for mine, theirs in pairs for name, norm in theirs.items())

    def apart_from_total(self) -> float:
        """How far the root of the sum of squares is from the total norm of a step, as a part of it."""
        return max(
            _part(abs(math.hypot(*norms.values()) - total), total)
            for norms, total in zip(self.by_block, self.outcome.norms, strict=True)
        )


def _part(difference: float, of: float) -> float:
    return difference / of if of else difference


def train_by_block(
    strategy: str,
    config: Mapping[str, Any],
    sizes: Mapping[str, Any],
    case: Case,
    device: str = "cpu",
    wrapper_config: Mapping[str, Any] | None = None,
    asks: bool = True,
) -> FoundNorms:
    """The task of one rank.

    Args:
        asks: for norms by block; else it trains without.

    Raises:
        AssertionError: asking has changed gradients.
    """
    manager = build_manager(strategy, config, sizes, case, device=device, wrapper_config=wrapper_config)
    by_block: list[dict[str, float]] = []

    def ask() -> None:
        before = _gradients(manager)
        by_block.append(manager.gradient_norms())
        if not all(map(_equal, before, _gradients(manager))):
            raise AssertionError("gradient_norms has changed gradients that the optimizer steps with.")

    found = train_steps(manager, case, range(case.steps), ask if asks else lambda: None)
    return FoundNorms(Outcome(*found, full_weights(manager)), by_block)


def _gradients(manager: StrategyManager) -> list[torch.Tensor | None]:
    """What the optimizer would step with, copied."""
    trained = [parameter for group in manager.optimizer.param_groups for parameter in group["params"]]
    return [None if parameter.grad is None else _local(parameter.grad).clone() for parameter in trained]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return bool(torch.equal(one, other))


@functools.lru_cache(maxsize=64)
def norms_reference(case: Case, device: str = "cpu") -> FoundNorms:
    """The case under `single`, on one rank, each step in one microbatch."""
    return pool(1).run(train_by_block, "single", {}, {}, case.undivided(), device, device=device)[0]

"""Training objectives, chosen by name: each a frozen config that is called with token statistics and a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .base import Column, Objective
from .heads import Reward, Value
from .policy import GRPO, PPO
from .preference import DPO, KTO, ORPO, SimPO
from .registry import check_objective, get_objective, list_objectives
from .supervised import CrossEntropy, Distill, Unlikelihood

if TYPE_CHECKING:
    from .functions import previous_tokens as previous_tokens

__all__ = ["DPO", "GRPO", "KTO", "ORPO", "PPO", "Column", "CrossEntropy", "Distill", "Objective", "Reward", "SimPO"]
__all__ += ["Unlikelihood", "Value", "check_objective", "get_objective", "list_objectives", "previous_tokens"]


def __getattr__(name: str) -> object:
    if name == "previous_tokens":
        from .functions import previous_tokens

        return previous_tokens
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

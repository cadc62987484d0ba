"""Training objectives: supervised losses, DPO and other preference losses, GRPO and PPO. Each is a frozen config."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .policy import GRPO, PPO, Value
from .preference import DPO, KTO, ORPO, Reward, SimPO
from .supervised import CrossEntropy, Distill, Unlikelihood

if TYPE_CHECKING:
    from .functional import previous_tokens as previous_tokens

__all__ = [
    "DPO",
    "GRPO",
    "KTO",
    "ORPO",
    "PPO",
    "CrossEntropy",
    "Distill",
    "Reward",
    "SimPO",
    "Unlikelihood",
    "Value",
    "previous_tokens",
]


def __getattr__(name: str) -> object:
    if name == "previous_tokens":
        from .functional import previous_tokens

        return previous_tokens
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

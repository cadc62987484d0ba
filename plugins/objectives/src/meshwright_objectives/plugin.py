"""Register the objectives of this project; imports no torch."""

from __future__ import annotations

from meshwright.plugin import FrozenModel, hookimpl

from .heads import Reward, Value
from .policy import GRPO, PPO
from .preference import DPO, KTO, ORPO, SimPO
from .supervised import CrossEntropy, Distill, Unlikelihood


@hookimpl
def register_objectives() -> list[type[FrozenModel]]:
    return [CrossEntropy, Distill, Unlikelihood, DPO, KTO, ORPO, SimPO, GRPO, PPO, Value, Reward]

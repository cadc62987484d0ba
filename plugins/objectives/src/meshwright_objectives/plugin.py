"""Register the objectives of this plugin. Imports no torch."""

from __future__ import annotations

from meshwright.plugin import FrozenModel, hookimpl

from .policy import GRPO, PPO, Value
from .preference import DPO, KTO, ORPO, Reward, SimPO
from .supervised import CrossEntropy, Distill, Unlikelihood


@hookimpl
def register_objectives() -> list[type[FrozenModel]]:
    return [CrossEntropy, Distill, Unlikelihood, DPO, KTO, ORPO, SimPO, GRPO, PPO, Value, Reward]

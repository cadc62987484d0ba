"""Hugging Face's Trainer and TRL's trainers over any strategy, with the numbers that one process has.

    from meshwright_trainer import MeshSFTTrainer
    trainer = MeshSFTTrainer("path", args=SFTConfig(...), train_dataset=..., mesh={"strategy": "fsdp2", "tp_size": 2})

`MeshTrainerMixin` goes before any other class that derives from `transformers.Trainer`, `MeshGRPOMixin` before one that
derives from trl's `GRPOTrainer`. Classes over trl's are made
when they are asked for, and need trl then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .grpo import MeshGRPOMixin as MeshGRPOMixin
    from .mesh_options import MeshArguments as MeshArguments
    from .mixin import MeshTrainerMixin as MeshTrainerMixin

_OVER = {
    "MeshTrainer": ("transformers", "Trainer"),
    "MeshSFTTrainer": ("trl", "SFTTrainer"),
    "MeshDPOTrainer": ("trl", "DPOTrainer"),
    "MeshRewardTrainer": ("trl", "RewardTrainer"),
    "MeshGRPOTrainer": ("trl", "GRPOTrainer"),
}
__all__ = ["MeshArguments", "MeshGRPOMixin", "MeshTrainerMixin", *_OVER]


def __getattr__(name: str) -> Any:
    if name == "MeshArguments":
        from .mesh_options import MeshArguments

        return MeshArguments
    if name == "MeshTrainerMixin":
        from .mixin import MeshTrainerMixin

        return MeshTrainerMixin
    if name == "MeshGRPOMixin":
        from .grpo import MeshGRPOMixin

        return MeshGRPOMixin
    if name in _OVER:
        from .over import over

        made = globals()[name] = over(name, *_OVER[name])
        return made
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

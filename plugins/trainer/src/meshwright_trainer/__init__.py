"""Run Hugging Face's Trainer and TRL's trainers under any strategy, with the results of one process.

    from meshwright_trainer import MeshSFTTrainer
    trainer = MeshSFTTrainer("path", args=SFTConfig(...), train_dataset=..., mesh={"strategy": "fsdp2", "tp_size": 2})

For other subclasses of `transformers.Trainer`, put `MeshTrainerMixin` first among the bases; for subclasses of trl's
`GRPOTrainer`, `MeshGRPOMixin`. Classes based on trl are created at first access, which imports trl.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from meshwright.plugin import ConfigError

if TYPE_CHECKING:
    from .arguments import MeshArguments as MeshArguments
    from .grpo import MeshGRPOMixin as MeshGRPOMixin
    from .mixin import MeshTrainerMixin as MeshTrainerMixin

_TRAINER_CLASSES = {
    "MeshTrainer": ("transformers", "Trainer"),
    "MeshSFTTrainer": ("trl", "SFTTrainer"),
    "MeshDPOTrainer": ("trl", "DPOTrainer"),
    "MeshRewardTrainer": ("trl", "RewardTrainer"),
    "MeshGRPOTrainer": ("trl", "GRPOTrainer"),
}
_LAZY_EXPORTS = {"MeshArguments": ".arguments", "MeshTrainerMixin": ".mixin", "MeshGRPOMixin": ".grpo"}
__all__ = [
    "MeshArguments",
    "MeshDPOTrainer",
    "MeshGRPOMixin",
    "MeshGRPOTrainer",
    "MeshRewardTrainer",
    "MeshSFTTrainer",
    "MeshTrainer",
    "MeshTrainerMixin",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY_EXPORTS:
        return getattr(import_module(_LAZY_EXPORTS[name], __name__), name)
    if name in _TRAINER_CLASSES:
        cls = globals()[name] = _make_trainer_class(name, *_TRAINER_CLASSES[name])
        return cls
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _make_trainer_class(name: str, package: str, base: str) -> type:
    """Create the class of the mixin and a trainer of an installed package."""
    from .grpo import MeshGRPOMixin
    from .mixin import MeshTrainerMixin

    try:
        cls = getattr(import_module(package), base)
    except ImportError as error:
        raise ConfigError(
            f"{name} derives from {base} of {package}, which cannot be imported: {error}. Install it: pip install "
            f"'{package}>=1.16'."
        ) from error
    mixin = MeshGRPOMixin if base == "GRPOTrainer" else MeshTrainerMixin
    return type(name, (mixin, cls), {"__doc__": f"`{base}` on a mesh; see `{mixin.__name__}`."})

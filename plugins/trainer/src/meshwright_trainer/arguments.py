"""What a trainer's arguments mean over a mesh: those that the layout takes over, and those that cannot be honoured."""

from __future__ import annotations

from typing import Any

from meshwright.base.errors import ConfigError
from meshwright.strategy.spec import StrategySpec

from .mesh_options import MeshOptions


def check_arguments(args: Any, trainer: type) -> None:
    """Refuse arguments that cannot be honoured, by name.

    Raises:
        ConfigError: names the first of them, with the way to go.
    """


def layout_options(args: Any, options: MeshOptions, spec: StrategySpec) -> MeshOptions:
    """The options of a layout with those that a trainer's arguments have for it: precision and recomputation.

    Raises:
        ConfigError: the strategy has no such option, or another value is given there.
    """
    config = dict(options.strategy_config)
    wanted: dict[str, Any] = {}
    if args.bf16:
        wanted["autocast_dtype"] = ("bfloat16", "bf16=True")
    if args.gradient_checkpointing:
        wanted["activation_checkpointing"] = (True, "gradient_checkpointing=True")
    for name, (value, said) in wanted.items():
        if name not in spec.config_cls.model_fields:
            raise ConfigError(
                f"{said}: strategy {spec.name!r} has no option {name}. Set {said.partition('=')[0]}=False, or take a "
                f"strategy that has it, such as fsdp2."
            )
        config.setdefault(name, value)
    return options.model_copy(update={"strategy_config": config})

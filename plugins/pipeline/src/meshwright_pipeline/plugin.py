"""Hooks of meshwright-pipeline. Imports no torch until a manager is built."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from meshwright.plugin import StrategySpec, hookimpl

from .config import PipelineConfig, check_options

if TYPE_CHECKING:
    import typer

    from meshwright.plugin import Mesh, StrategyManager

    from .manager import PipelineManager


def build(config: PipelineConfig, mesh: Mesh, inner: Callable[[Mesh], StrategyManager]) -> PipelineManager:
    from .manager import PipelineManager

    return PipelineManager(config, mesh, inner)


@hookimpl
def register_commands(app: typer.Typer) -> None:
    from .show_command import add_commands

    add_commands(app)


@hookimpl
def register_strategies() -> list[StrategySpec]:
    return [
        StrategySpec(
            name="pipeline",
            aliases=("pp",),
            summary="Splits the blocks into stages and sends microbatches through them; wraps any strategy.",
            axes=frozenset({"pp"}),
            config_cls=PipelineConfig,
            build=build,
            check=check_options,
            is_wrapper=True,
        )
    ]

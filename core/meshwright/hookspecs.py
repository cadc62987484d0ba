"""The hooks that a plugin can implement.

A plugin is a module (or object) named by an entry point of the group `meshwright`. It marks its functions with
`meshwright.hookimpl`; a marked function whose name is not below is refused, so a misspelt hook is never silent.
Source: pluggy, https://pluggy.readthedocs.io.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    import typer
    from torch import nn

    from .contract import StrategySpec
    from .layout import ModelLayout
    from .train import StepResult

PROJECT = "meshwright"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def register_strategies() -> list[StrategySpec]:  # type: ignore[empty-body]
    """Return the strategies this plugin brings. Must not import torch: `build` does that when it is called."""


@hookspec(firstresult=True)
def model_layout(model: nn.Module) -> ModelLayout | None:
    """Describe the structure of a model that the rules of `meshwright.layout` would get wrong; None to pass."""


@hookspec
def register_commands(app: typer.Typer) -> None:
    """Add subcommands to the `meshwright` command line. Called once, after the built-in commands."""


@hookspec
def on_step_end(result: StepResult) -> None:
    """Observe a finished optimizer step, on every rank. Must not issue collectives."""

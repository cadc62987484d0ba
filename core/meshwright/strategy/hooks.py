"""The hooks that a plugin can implement.

A plugin is a module (or object) named by an entry point of the group `meshwright`. It marks its functions with
`meshwright.hookimpl`; a marked function whose name is not below is refused, so a misspelt hook is never silent. Source:
pluggy, https://pluggy.readthedocs.io.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import pluggy

if TYPE_CHECKING:
    import typer
    from torch import nn
    from torch.distributed.tensor.parallel import ParallelStyle

    from ..base.validation import FrozenModel
    from ..events.run import BadStep, Evaluation, Fault, RunInfo, RunSection, RunSummary, SavedCheckpoint, TrackerSpec
    from ..events.step import StepResult
    from ..mesh.mesh import Mesh
    from ..mesh.world import World
    from ..model.layout import ModelLayout
    from .contract import StrategySpec

StyleSpec: TypeAlias = "str | ParallelStyle"
"""How tensor parallelism shards a module or parameter: the name of a style, or one of torch's."""

PROJECT = "meshwright"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a function of a plugin, or a method of an observer, as an implementation of the hook of its name."""


@hookspec
def register_strategies() -> list[StrategySpec]:  # type: ignore[empty-body]
    """Return the plugin's strategies. Must not import torch: `build` does that when it is called."""


@hookspec
def register_objectives() -> list[type[FrozenModel]]:  # type: ignore[empty-body]
    """Return the objectives this plugin brings, which run files name. Must not import torch.

    Each is a class derived from `meshwright.plugin.ObjectiveConfig`: its fields are the options, its `name` the name.
    """


@hookspec(firstresult=True)
def model_layout(model: nn.Module) -> ModelLayout | None:
    """Describe the structure of a model that the rules of `meshwright.model.layout` would get wrong; None to pass."""


@hookspec(firstresult=True)
def tp_plan(model: nn.Module, layout: ModelLayout, sequence_parallel: bool) -> Mapping[str, StyleSpec] | None:
    """Say how tensor parallelism shards a model, before its own plan is asked; None to pass.

    Maps names of modules or parameters, with `*` for the number of a layer, to names of styles
    (`meshwright.parallel.tensor.STYLES`) or to styles of torch.distributed.tensor.parallel.
    """


@hookspec
def register_commands(app: typer.Typer) -> None:
    """Add subcommands to the `meshwright` command line. Called once, after the built-in commands."""


@hookspec
def register_launchers() -> list[Any]:  # type: ignore[empty-body]
    """Return launchers (`meshwright.launch.claim.Launcher`), asked before the built-in ones. Must not import torch."""


@hookspec
def register_trackers() -> list[TrackerSpec]:  # type: ignore[empty-body]
    """Return the plugin's trackers, which run files name. Must not import their libraries."""


@hookspec
def register_run_sections() -> list[RunSection]:  # type: ignore[empty-body]
    """Return the sections that the plugin adds to the run file. Must not import torch."""


@hookspec(firstresult=True)
def monitor_run(config: Any, world_size: int) -> Any:
    """Return what monitors a run, a `meshwright_run.run_rank.Companion`; None to pass.

    Called before the process group exists, by the process that starts the ranks or by the first of them.

    Args:
        config: the `RunConfig`.
        world_size: of the run.
    """


@hookspec(firstresult=True)
def render_plan(config: Any, world_size: int) -> list[Any] | None:
    """Return what a run would hold, send and take, as Rich renderables (`meshwright train --plan-only`); None to pass.

    Takes the arguments of `monitor_run`.
    """


@hookspec(firstresult=True)
def open_state_replication(world: World) -> Any:
    """Open the copies of training state outside of this process, `meshwright.train.loop.extension.StateReplication`;
    None to pass. Collective. Called if a run asks for copies (`checkpoint.replicate`)."""


# -- observers: called on every rank, in this order; none may issue collectives, and what one raises ends the run


@hookspec
def on_run_start(run: RunInfo, mesh: Mesh) -> None:
    """Called before the first step of this attempt."""


@hookspec
def on_evaluation(evaluation: Evaluation) -> None:
    """Called with the losses of the sets after a step, before its `on_step_end`."""


@hookspec
def on_step_end(result: StepResult) -> None:
    """Called after each optimizer step."""


@hookspec
def on_bad_step(bad_step: BadStep) -> None:
    """Called for a step that is skipped, before its `on_step_end`, or that has rewound the run."""


@hookspec
def on_checkpoint(checkpoint: SavedCheckpoint) -> None:
    """Called for each checkpoint, as soon as training continues."""


@hookspec
def on_fault(fault: Fault) -> None:
    """Called with the error that ends the run on this rank."""


@hookspec
def on_run_end(summary: RunSummary) -> None:
    """Called at the end of a run, also of one that fails, as long as its process lives."""

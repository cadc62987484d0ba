"""The hooks that a plugin can implement.

A plugin is a module or object that an entry point of the group `meshwright` names. It marks its functions with
`meshwright.hookimpl`. A marked function whose name is not a hook is rejected, so a misspelled hook is an error. Source:
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
"""How tensor parallelism shards a module or parameter: the name of a style, or a style object of torch."""

PROJECT = "meshwright"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Decorator that marks a plugin's function, or an observer's method, as an implementation of the hook of that name."""


@hookspec
def register_strategies() -> list[StrategySpec]:  # type: ignore[empty-body]
    """Return the plugin's strategies. Must not import torch; `StrategySpec.build` may."""


@hookspec
def register_objectives() -> list[type[FrozenModel]]:  # type: ignore[empty-body]
    """Return the plugin's objectives, which run files select by name. Must not import torch.

    Each is a subclass of `meshwright.plugin.ObjectiveConfig`: its fields are the options, its `name` is the name.
    """


@hookspec(firstresult=True)
def model_layout(model: nn.Module) -> ModelLayout | None:
    """Return the layout of a model that `meshwright.model.layout` does not infer correctly; None to pass."""


@hookspec(firstresult=True)
def tp_plan(model: nn.Module, layout: ModelLayout, sequence_parallel: bool) -> Mapping[str, StyleSpec] | None:
    """Return the tensor-parallel plan of a model, which takes precedence over the model's own plan; None to pass.

    A plan maps names of modules or parameters, with `*` for a layer index, to names of styles
    (`meshwright.parallel.tensor.STYLES`) or to styles of torch.distributed.tensor.parallel.
    """


@hookspec
def register_commands(app: typer.Typer) -> None:
    """Add subcommands to the `meshwright` command line. Called once, after the built-in commands."""


@hookspec
def register_launchers() -> list[Any]:  # type: ignore[empty-body]
    """Return launchers (`meshwright.launch.cluster_environment.Launcher`) that take precedence over the built-in ones.

    Must not import torch.
    """


@hookspec
def register_trackers() -> list[TrackerSpec]:  # type: ignore[empty-body]
    """Return the plugin's trackers, which run files select by name. Must not import their libraries."""


@hookspec
def register_run_sections() -> list[RunSection]:  # type: ignore[empty-body]
    """Return the plugin's sections of the run file. Must not import torch."""


@hookspec(firstresult=True)
def monitor_run(config: Any, world_size: int) -> Any:
    """Return the monitor of a run, a `meshwright_run.run_rank.RunMonitor`; None to pass.

    Called before the process group exists, by the process that starts the ranks or by rank 0.

    Args:
        config: the `RunConfig`.
        world_size: number of ranks of the run.
    """


@hookspec(firstresult=True)
def render_plan(config: Any, world_size: int) -> list[Any] | None:
    """Render a run's predicted memory, communication and time (`meshwright train --plan-only`); None to pass.

    Returns Rich renderables. The arguments are those of `monitor_run`.
    """


@hookspec(firstresult=True)
def open_state_replication(world: World) -> Any:
    """Return the replication of training state (`meshwright.training.loop.extension.StateReplication`); None to pass.

    Replicas are kept outside of the training process. Collective. Called if a run enables `checkpoint.replicate`.
    """


# -- observers: called on every rank, in this order. None may issue collectives. An exception ends the run.


@hookspec
def on_run_start(run: RunInfo, mesh: Mesh) -> None:
    """Called before the first step of this attempt."""


@hookspec
def on_evaluation(evaluation: Evaluation) -> None:
    """Called with the evaluation losses after a step, before that step's `on_step_end`."""


@hookspec
def on_step_end(result: StepResult) -> None:
    """Called after each optimizer step."""


@hookspec
def on_bad_step(bad_step: BadStep) -> None:
    """Called for a step that is skipped, before its `on_step_end`, or that has triggered a rollback."""


@hookspec
def on_checkpoint(checkpoint: SavedCheckpoint) -> None:
    """Called for each checkpoint, as soon as training continues."""


@hookspec
def on_fault(fault: Fault) -> None:
    """Called with the error that ends the run on this rank."""


@hookspec
def on_run_end(summary: RunSummary) -> None:
    """Called at the end of a run, including one that fails, unless the process is killed."""

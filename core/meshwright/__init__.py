"""Train any Hugging Face causal LM under any parallelism strategy, chosen by name, with one loop.

Names are imported on first use, so that `import meshwright` and listing strategies do not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from .base.version import __version__ as __version__

if TYPE_CHECKING:
    from meshwright_run.run_file import RunConfig as RunConfig
    from meshwright_run.run_file import load_run as load_run

    from .base.errors import BatchError as BatchError
    from .base.errors import CheckpointError as CheckpointError
    from .base.errors import ConfigError as ConfigError
    from .base.errors import DataError as DataError
    from .base.errors import MeshError as MeshError
    from .base.errors import MeshwrightError as MeshwrightError
    from .base.errors import ModelError as ModelError
    from .base.errors import RankError as RankError
    from .base.errors import StrategyError as StrategyError
    from .base.errors import TrainingError as TrainingError
    from .base.errors import UnknownStrategyError as UnknownStrategyError
    from .base.stopping import Stopped as Stopped
    from .base.stopping import StopSignals as StopSignals
    from .base.types import Batch as Batch
    from .base.types import Objective as Objective
    from .base.types import OptimizerFactory as OptimizerFactory
    from .base.validation import FrozenModel as FrozenModel
    from .checkpoint import Checkpointer as Checkpointer
    from .checkpoint import load_checkpoint as load_checkpoint
    from .checkpoint import save_checkpoint as save_checkpoint
    from .events.run import BadStep as BadStep
    from .events.run import Evaluation as Evaluation
    from .events.run import Fault as Fault
    from .events.run import RunInfo as RunInfo
    from .events.run import RunSummary as RunSummary
    from .events.run import SavedCheckpoint as SavedCheckpoint
    from .events.run import TrackerSpec as TrackerSpec
    from .events.step import StepResult as StepResult
    from .files.class_paths import allow_imports as allow_imports
    from .launch.open_world import open_world as open_world
    from .manager.data_parallel import DataParallelManager as DataParallelManager
    from .mesh.mesh import Mesh as Mesh
    from .mesh.sizes import Degrees as Degrees
    from .mesh.sizes import MeshSizes as MeshSizes
    from .mesh.world import World as World
    from .model.layout import ModelLayout as ModelLayout
    from .objectives.registry import get_objective as get_objective
    from .objectives.registry import list_objectives as list_objectives
    from .optim.build import optimizer_factory as optimizer_factory
    from .optim.config import EMAConfig as EMAConfig
    from .optim.config import OptimizerConfig as OptimizerConfig
    from .optim.config import OptimizerGroup as OptimizerGroup
    from .optim.groups import Optimizers as Optimizers
    from .step.agreement import count_tokens as count_tokens
    from .step.tokens import Outputs as Outputs
    from .step.tokens import Tokens as Tokens
    from .strategy.contract import DistributedConfig as DistributedConfig
    from .strategy.contract import StrategyConfig as StrategyConfig
    from .strategy.contract import StrategyManager as StrategyManager
    from .strategy.contract import StrategySpec as StrategySpec
    from .strategy.hooks import hookimpl as hookimpl
    from .strategy.registry import Registry as Registry
    from .strategy.registry import get_registry as get_registry
    from .strategy.registry import get_strategy as get_strategy
    from .strategy.registry import list_strategies as list_strategies
    from .strategy.registry import model_layout as model_layout
    from .strategy.stack import Stack as Stack
    from .strategy.stack import resolve as resolve
    from .train.from_pretrained import from_config as from_config
    from .train.from_pretrained import from_pretrained as from_pretrained
    from .train.loop.ema import EMA as EMA
    from .train.loop.fit import fit as fit
    from .train.loop.monitors import BadStepConfig as BadStepConfig
    from .train.loop.monitors import EarlyStopping as EarlyStopping
    from .train.loop.options import Callback as Callback
    from .train.loop.options import Loop as Loop

_NAMES = {
    "base.errors": (
        "BatchError CheckpointError ConfigError DataError MeshError MeshwrightError ModelError RankError "
        "StrategyError TrainingError UnknownStrategyError"
    ),
    "base.stopping": "StopSignals Stopped",
    "base.types": "Batch Objective OptimizerFactory",
    "base.validation": "FrozenModel",
    "checkpoint": "Checkpointer load_checkpoint save_checkpoint",
    "events.run": "BadStep Evaluation Fault RunInfo RunSummary SavedCheckpoint TrackerSpec",
    "events.step": "StepResult",
    "files.class_paths": "allow_imports",
    "launch.open_world": "open_world",
    "manager.data_parallel": "DataParallelManager",
    "mesh.mesh": "Mesh",
    "mesh.sizes": "Degrees MeshSizes",
    "mesh.world": "World",
    "model.layout": "ModelLayout",
    "objectives.registry": "get_objective list_objectives",
    "optim.build": "optimizer_factory",
    "optim.config": "EMAConfig OptimizerConfig OptimizerGroup",
    "optim.groups": "Optimizers",
    "step.agreement": "count_tokens",
    "step.tokens": "Outputs Tokens",
    "strategy.contract": "DistributedConfig StrategyConfig StrategyManager StrategySpec",
    "strategy.hooks": "hookimpl",
    "strategy.registry": "Registry get_registry get_strategy list_strategies model_layout",
    "strategy.stack": "Stack resolve",
    "train.from_pretrained": "from_config from_pretrained",
    "train.loop.ema": "EMA",
    "train.loop.fit": "fit",
    "train.loop.monitors": "BadStepConfig EarlyStopping",
    "train.loop.options": "Callback Loop",
}
"""Public names by module."""
_OF_RUN = ("RunConfig", "load_run")
"""Public names of the plugin meshwright-run."""
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF and name not in _OF_RUN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .files.versions import check_torch

    check_torch()
    if name in _OF_RUN:
        from .strategy.registry import import_plugin

        return getattr(import_plugin("run", "run_file"), name)
    return getattr(importlib.import_module(f".{_MODULE_OF[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULE_OF, *_OF_RUN])

"""Train any Hugging Face causal LM under any parallelism strategy, chosen by name, with one loop.

Names are imported on first use, so that `import meshwright` and listing strategies do not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from .base.version import __version__ as __version__

if TYPE_CHECKING:
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
    from .step.agreement import count_tokens as count_tokens
    from .step.tokens import Outputs as Outputs
    from .step.tokens import Tokens as Tokens
    from .strategy.ask import model_layout as model_layout
    from .strategy.contract import Batch as Batch
    from .strategy.contract import Objective as Objective
    from .strategy.contract import OptimizerFactory as OptimizerFactory
    from .strategy.contract import StrategyManager as StrategyManager
    from .strategy.hooks import hookimpl as hookimpl
    from .strategy.registry import Registry as Registry
    from .strategy.registry import get_registry as get_registry
    from .strategy.registry import get_strategy as get_strategy
    from .strategy.registry import list_strategies as list_strategies
    from .strategy.spec import DistributedConfig as DistributedConfig
    from .strategy.spec import StrategyConfig as StrategyConfig
    from .strategy.spec import StrategySpec as StrategySpec
    from .strategy.stack import Stack as Stack
    from .strategy.stack import resolve as resolve
    from .train.bad_steps import BadStepConfig as BadStepConfig
    from .train.ema import EMA as EMA
    from .train.from_pretrained import from_config as from_config
    from .train.from_pretrained import from_pretrained as from_pretrained
    from .train.loop import Callback as Callback
    from .train.loop import Loop as Loop
    from .train.loop import fit as fit
    from .train.optim import optimizer_factory as optimizer_factory
    from .train.optimizer_config import EMAConfig as EMAConfig
    from .train.optimizer_config import OptimizerConfig as OptimizerConfig
    from .train.optimizer_config import OptimizerGroup as OptimizerGroup
    from .train.optimizers import Optimizers as Optimizers
    from .train.run_file import RunConfig as RunConfig
    from .train.run_file import load_run as load_run
    from .train.watch import EarlyStopping as EarlyStopping

_MODULE_OF = {
    "BatchError": "base.errors",
    "CheckpointError": "base.errors",
    "ConfigError": "base.errors",
    "DataError": "base.errors",
    "MeshError": "base.errors",
    "MeshwrightError": "base.errors",
    "ModelError": "base.errors",
    "RankError": "base.errors",
    "StrategyError": "base.errors",
    "TrainingError": "base.errors",
    "UnknownStrategyError": "base.errors",
    "FrozenModel": "base.validation",
    "Stopped": "base.stopping",
    "StopSignals": "base.stopping",
    "Checkpointer": "checkpoint",
    "load_checkpoint": "checkpoint",
    "save_checkpoint": "checkpoint",
    "allow_imports": "files.class_paths",
    "DataParallelManager": "manager.data_parallel",
    "Mesh": "mesh.mesh",
    "World": "mesh.world",
    "open_world": "launch.open_world",
    "Degrees": "mesh.sizes",
    "MeshSizes": "mesh.sizes",
    "ModelLayout": "model.layout",
    "model_layout": "strategy.ask",
    "get_objective": "objectives.registry",
    "list_objectives": "objectives.registry",
    "count_tokens": "step.agreement",
    "Outputs": "step.tokens",
    "Tokens": "step.tokens",
    "Batch": "strategy.contract",
    "Objective": "strategy.contract",
    "DistributedConfig": "strategy.spec",
    "OptimizerFactory": "strategy.contract",
    "StrategyConfig": "strategy.spec",
    "StrategyManager": "strategy.contract",
    "StrategySpec": "strategy.spec",
    "hookimpl": "strategy.hooks",
    "Registry": "strategy.registry",
    "get_registry": "strategy.registry",
    "get_strategy": "strategy.registry",
    "list_strategies": "strategy.registry",
    "Stack": "strategy.stack",
    "resolve": "strategy.stack",
    "EMA": "train.ema",
    "from_config": "train.from_pretrained",
    "from_pretrained": "train.from_pretrained",
    "Callback": "train.loop",
    "BadStep": "events.run",
    "BadStepConfig": "train.bad_steps",
    "EarlyStopping": "train.watch",
    "Loop": "train.loop",
    "StepResult": "events.step",
    "Evaluation": "events.run",
    "Fault": "events.run",
    "RunInfo": "events.run",
    "RunSummary": "events.run",
    "SavedCheckpoint": "events.run",
    "TrackerSpec": "events.run",
    "fit": "train.loop",
    "optimizer_factory": "train.optim",
    "EMAConfig": "train.optimizer_config",
    "OptimizerConfig": "train.optimizer_config",
    "OptimizerGroup": "train.optimizer_config",
    "Optimizers": "train.optimizers",
    "RunConfig": "train.run_file",
    "load_run": "train.run_file",
}


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .files.versions import check_torch

    check_torch()
    return getattr(importlib.import_module(f".{_MODULE_OF[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULE_OF])

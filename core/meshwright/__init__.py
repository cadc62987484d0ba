"""Train any Hugging Face causal LM under any parallelism strategy, chosen by name, with one loop.

Names are imported on first use, so that `import meshwright` and listing strategies do not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .batch import count_tokens as count_tokens
    from .checkpoint import Checkpointer as Checkpointer
    from .checkpoint import load_checkpoint as load_checkpoint
    from .checkpoint import save_checkpoint as save_checkpoint
    from .contract import Batch as Batch
    from .contract import DistributedConfig as DistributedConfig
    from .contract import Estimate as Estimate
    from .contract import ModelSize as ModelSize
    from .contract import OptimizerFactory as OptimizerFactory
    from .contract import StrategyConfig as StrategyConfig
    from .contract import StrategyManager as StrategyManager
    from .contract import StrategySpec as StrategySpec
    from .data_parallel import DataParallelManager as DataParallelManager
    from .errors import BatchError as BatchError
    from .errors import CheckpointError as CheckpointError
    from .errors import ConfigError as ConfigError
    from .errors import DataError as DataError
    from .errors import MeshError as MeshError
    from .errors import MeshwrightError as MeshwrightError
    from .errors import ModelError as ModelError
    from .errors import RankError as RankError
    from .errors import StrategyError as StrategyError
    from .errors import TrainingError as TrainingError
    from .errors import UnknownStrategyError as UnknownStrategyError
    from .hookspecs import hookimpl as hookimpl
    from .layout import ModelLayout as ModelLayout
    from .layout import model_layout as model_layout
    from .loading import from_config as from_config
    from .loading import from_pretrained as from_pretrained
    from .mesh import Mesh as Mesh
    from .mesh import World as World
    from .mesh import open_world as open_world
    from .optim import optimizer_factory as optimizer_factory
    from .registry import Registry as Registry
    from .registry import get_registry as get_registry
    from .registry import get_strategy as get_strategy
    from .registry import list_strategies as list_strategies
    from .runfile import OptimizerConfig as OptimizerConfig
    from .runfile import RunConfig as RunConfig
    from .runfile import load_run as load_run
    from .sizes import Degrees as Degrees
    from .sizes import MeshSizes as MeshSizes
    from .stack import Stack as Stack
    from .stack import resolve as resolve
    from .train import Loop as Loop
    from .train import StepResult as StepResult
    from .train import fit as fit
    from .validation import FrozenModel as FrozenModel

_MODULE_OF = {
    "count_tokens": "batch",
    "Checkpointer": "checkpoint",
    "load_checkpoint": "checkpoint",
    "save_checkpoint": "checkpoint",
    "Batch": "contract",
    "DistributedConfig": "contract",
    "Estimate": "contract",
    "ModelSize": "contract",
    "OptimizerFactory": "contract",
    "StrategyConfig": "contract",
    "StrategyManager": "contract",
    "StrategySpec": "contract",
    "DataParallelManager": "data_parallel",
    "BatchError": "errors",
    "CheckpointError": "errors",
    "ConfigError": "errors",
    "DataError": "errors",
    "MeshError": "errors",
    "MeshwrightError": "errors",
    "ModelError": "errors",
    "RankError": "errors",
    "StrategyError": "errors",
    "TrainingError": "errors",
    "UnknownStrategyError": "errors",
    "hookimpl": "hookspecs",
    "ModelLayout": "layout",
    "model_layout": "layout",
    "from_config": "loading",
    "from_pretrained": "loading",
    "Mesh": "mesh",
    "World": "mesh",
    "open_world": "mesh",
    "optimizer_factory": "optim",
    "Registry": "registry",
    "get_registry": "registry",
    "get_strategy": "registry",
    "list_strategies": "registry",
    "OptimizerConfig": "runfile",
    "RunConfig": "runfile",
    "load_run": "runfile",
    "Degrees": "sizes",
    "MeshSizes": "sizes",
    "Stack": "stack",
    "resolve": "stack",
    "Loop": "train",
    "StepResult": "train",
    "fit": "train",
    "FrozenModel": "validation",
}

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULE_OF[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULE_OF])

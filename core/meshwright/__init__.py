"""Train any Hugging Face causal LM under any parallelism strategy, chosen by name, with one loop.

Names are imported on first use, so that `import meshwright` and listing strategies do not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .batch import count_tokens
    from .contract import (
        Batch,
        Estimate,
        ModelSize,
        OptimizerFactory,
        StrategyConfig,
        StrategyManager,
        StrategySpec,
    )
    from .data_parallel import DataParallelManager
    from .errors import (
        BatchError,
        ConfigError,
        DataError,
        MeshError,
        MeshwrightError,
        ModelError,
        RankError,
        StrategyError,
        TrainingError,
        UnknownStrategyError,
    )
    from .hookspecs import hookimpl
    from .layout import ModelLayout, model_layout
    from .mesh import Mesh, World, open_world
    from .registry import Registry, get_registry, get_strategy, list_strategies
    from .sizes import Degrees, MeshSizes
    from .stack import Stack, resolve
    from .train import Loop, StepResult, fit

_HOME = {
    "batch": ["count_tokens"],
    "contract": [
        "Batch",
        "Estimate",
        "ModelSize",
        "OptimizerFactory",
        "StrategyConfig",
        "StrategyManager",
        "StrategySpec",
    ],
    "data_parallel": ["DataParallelManager"],
    "errors": [
        "BatchError",
        "ConfigError",
        "DataError",
        "MeshError",
        "MeshwrightError",
        "ModelError",
        "RankError",
        "StrategyError",
        "TrainingError",
        "UnknownStrategyError",
    ],
    "hookspecs": ["hookimpl"],
    "layout": ["ModelLayout", "model_layout"],
    "mesh": ["Mesh", "World", "open_world"],
    "registry": ["Registry", "get_registry", "get_strategy", "list_strategies"],
    "sizes": ["Degrees", "MeshSizes"],
    "stack": ["Stack", "resolve"],
    "train": ["Loop", "StepResult", "fit"],
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [  # noqa: PLE0604 (a computed list)
    *_MODULE_OF,
]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULE_OF[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULE_OF])

"""The strategy `fsdp2`: parameters, gradients and optimizer state are sharded over the data-parallel ranks."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from meshwright.plugin import import_class_from_path, import_classes_from_paths

from .config import FSDP2Config

if TYPE_CHECKING:
    from meshwright.plugin import get_hf_tp_shard_plan, translate_to_torch_parallel_style

    from .forward_wrappers import _patch_is_packed_sequence_for_training
    from .manager import FSDP2Manager
    from .reference_api import (
        _destroy_dist_connection,
        apply_fsdp_sharding_recursively,
        fsdp2_strategy_parallelize,
        unshard_fsdp2_model,
    )

__all__ = [
    "FSDP2Config",
    "FSDP2Manager",
    "_destroy_dist_connection",
    "_patch_is_packed_sequence_for_training",
    "apply_fsdp_sharding_recursively",
    "fsdp2_strategy_parallelize",
    "get_hf_tp_shard_plan",
    "import_class_from_path",
    "import_classes_from_paths",
    "translate_to_torch_parallel_style",
    "unshard_fsdp2_model",
]

# These modules import torch. Listing strategies and validating a config must not.
_LAZY_IMPORTS = {
    "FSDP2Manager": ".manager",
    "_destroy_dist_connection": ".reference_api",
    "_patch_is_packed_sequence_for_training": ".forward_wrappers",
    "apply_fsdp_sharding_recursively": ".reference_api",
    "fsdp2_strategy_parallelize": ".reference_api",
    "get_hf_tp_shard_plan": "meshwright.parallel.tensor",
    "translate_to_torch_parallel_style": "meshwright.parallel.tensor",
    "unshard_fsdp2_model": ".reference_api",
}


def __getattr__(name: str) -> object:
    if name not in _LAZY_IMPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY_IMPORTS[name], __name__), name)

"""The strategy `megatron_fsdp`: NVIDIA's Megatron-FSDP with ZeRO 0 to 3 and HSDP, on GPUs and on a CPU."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from .config import MegatronFSDPConfig

if TYPE_CHECKING:
    from .manager import MegatronFSDPManager
    from .reference_api import megatron_fsdp_strategy_parallelize, nvfsdp_strategy_parallelize

HAVE_NVFSDP = importlib.util.find_spec("megatron_fsdp") is not None
"""Whether NVIDIA's package is installed. Its version is checked when a manager is built."""

__all__ = [
    "HAVE_NVFSDP",
    "MegatronFSDPConfig",
    "MegatronFSDPManager",
    "megatron_fsdp_strategy_parallelize",
    "nvfsdp_strategy_parallelize",
]

# These modules import torch. Listing strategies and validating a config must not.
_LAZY_IMPORTS = {
    "MegatronFSDPManager": ".manager",
    "megatron_fsdp_strategy_parallelize": ".reference_api",
    "nvfsdp_strategy_parallelize": ".reference_api",
}


def __getattr__(name: str) -> object:
    if name not in _LAZY_IMPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY_IMPORTS[name], __name__), name)

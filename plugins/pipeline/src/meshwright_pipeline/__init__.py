"""Pipeline parallelism over any strategy: the options, and the manager for custom training loops.

Hooks for the command line and other plugins are in `plugin`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .config import PipelineConfig

if TYPE_CHECKING:
    from .manager import PipelineManager

__all__ = ["PipelineConfig", "PipelineManager"]


def __getattr__(name: str) -> object:
    # The manager imports torch, which listing strategies and validating a config must not do.
    if name == "PipelineManager":
        from .manager import PipelineManager

        return PipelineManager
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

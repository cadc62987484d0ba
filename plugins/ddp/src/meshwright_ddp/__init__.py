"""The strategy `ddp`: data parallelism with a full replica of the model on each rank, or with ZeRO-1."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .config import DDPConfig, DistributedDataParallelConfig

if TYPE_CHECKING:
    from .manager import DDPManager

__all__ = ["DDPConfig", "DDPManager", "DistributedDataParallelConfig"]


def __getattr__(name: str) -> object:
    # The manager imports torch. Listing strategies and validating a config must not.
    if name == "DDPManager":
        from .manager import DDPManager

        return DDPManager
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

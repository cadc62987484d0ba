"""FSDP2 as a meshwright strategy: parameters, gradients and optimizer state sharded over the data-parallel ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .config import FSDP2Config

if TYPE_CHECKING:
    from .manager import FSDP2Manager

__all__ = ["FSDP2Config", "FSDP2Manager"]


def __getattr__(name: str) -> object:
    # The manager imports torch, which listing strategies and validating a config must not.
    if name == "FSDP2Manager":
        from .manager import FSDP2Manager

        return FSDP2Manager
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Training objectives by name: frozen configs that are called with token statistics and a batch.

The project's objectives, such as `DPO`, are in the plugin meshwright-objectives. They can also be imported from here.
"""

from __future__ import annotations

from typing import Any

from .base import Column, ObjectiveConfig
from .registry import check_objective, get_objective, list_objectives

__all__ = ["Column", "ObjectiveConfig", "check_objective", "get_objective", "list_objectives"]


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ..base.lazy import import_plugin

    return getattr(import_plugin("objectives"), name)

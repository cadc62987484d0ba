"""What is known of a model: what plugins say of it, else what its structure says."""

from __future__ import annotations

from torch import nn

from ..model.layout import ModelLayout, layout_by_structure
from .registry import Registry, get_registry


def model_layout(model: nn.Module, registry: Registry | None = None) -> ModelLayout:
    """Describe the structure of a whole model: what a plugin of `registry` (None: of the installed ones) says,
    else what its modules say."""
    registry = registry or get_registry()
    answer = registry.hook.model_layout(model=model)
    return answer if answer is not None else layout_by_structure(model)

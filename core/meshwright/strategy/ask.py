"""What is known of a model: what plugins say of it, else what its structure says."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ..model.layout import ModelLayout, layout_by_structure
from .registry import Registry, get_registry


@dataclass(frozen=True)
class ModelSize:
    """How large a model is, as a whole."""

    parameters: int
    """All elements; a tied weight counts once."""
    trainable: int
    bytes_per_element: int


def model_layout(model: nn.Module, registry: Registry | None = None) -> ModelLayout:
    """Describe the structure of a whole model: what a plugin of `registry` (None: of the installed ones) says,
    else what its modules say."""
    registry = registry or get_registry()
    answer = registry.hook.model_layout(model=model)
    return answer if answer is not None else layout_by_structure(model)


def model_size(model: nn.Module) -> ModelSize:
    """Count what `model` holds."""
    parameters = list(model.parameters())
    return ModelSize(
        parameters=sum(p.numel() for p in parameters),
        trainable=sum(p.numel() for p in parameters if p.requires_grad),
        bytes_per_element=parameters[0].element_size() if parameters else 0,
    )

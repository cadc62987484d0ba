"""How large a model is."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class ModelSize:
    """How large a model is, as a whole."""

    parameters: int
    """All elements; a tied weight counts once."""
    trainable: int
    bytes_per_element: int


def model_size(model: nn.Module) -> ModelSize:
    """Count what `model` holds."""
    parameters = list(model.parameters())
    return ModelSize(
        parameters=sum(p.numel() for p in parameters),
        trainable=sum(p.numel() for p in parameters if p.requires_grad),
        bytes_per_element=parameters[0].element_size() if parameters else 0,
    )

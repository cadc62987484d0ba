"""How large a model is."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ..base.errors import ModelError


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


def check_elements(model: nn.Module) -> None:
    """Refuse parameters without elements that are to be trained: their gradients cannot be sharded.

    Raises:
        ModelError: names the first.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.numel() == 0:
            raise ModelError(
                f"{name} is to be trained, but its shape {tuple(parameter.shape)} has no elements. Change the size of "
                f"the model's configuration that is 0, or freeze the parameter."
            )

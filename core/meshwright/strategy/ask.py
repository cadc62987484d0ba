"""What is known of a model: what plugins say of it, else what its structure says."""

from __future__ import annotations

from torch import nn

from ..model.layout import ModelLayout, layout_by_structure
from .registry import Registry, get_registry
from .spec import ModelSize


def model_layout(model: nn.Module, registry: Registry | None = None) -> ModelLayout:
    """Describe `model`: what a plugin's hook says, else what its structure says."""
    registry = registry or get_registry()
    answer = registry.hook.model_layout(model=model)
    return answer if answer is not None else layout_by_structure(model)


def model_size(model: nn.Module, layout: ModelLayout) -> ModelSize:
    """Count what `meshwright.strategy.contract.Estimate` is made from."""
    parameters = list(model.parameters())
    return ModelSize(
        parameters=sum(p.numel() for p in parameters),
        trainable=sum(p.numel() for p in parameters if p.requires_grad),
        largest_block=max(
            (sum(p.numel() for p in model.get_submodule(block).parameters()) for block in layout.blocks), default=0
        ),
        bytes_per_element=parameters[0].element_size() if parameters else 0,
    )

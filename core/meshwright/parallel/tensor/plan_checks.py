"""What a tensor-parallel plan must say of a layer so that parts of its weight become the right output."""

from __future__ import annotations

import inspect
import re

from torch import nn
from transformers.pytorch_utils import Conv1D

from ...base.errors import ConfigError
from ...model.layout import ModelLayout
from .adapters import IN, OUT
from .module_styles import Plan


def check_layers_are_named(plan: Plan, model: nn.Module) -> None:
    """Refuse to shard the weight of a layer around whose forward nothing would be communicated.

    Raises:
        ConfigError: the plan gives the style to the parameter alone.
    """
    for name, style in plan.parameters.items():
        path = name.rpartition(".")[0]
        owner = path.removesuffix(".base_layer")
        is_layer = type(model.get_submodule(path)) in (nn.Linear, nn.Embedding, Conv1D)
        if is_layer and style in (*OUT, *IN) and owner not in plan.modules and not is_read(model, owner):
            raise ConfigError(
                f"{plan.source} gives the parameter {name!r} the style {style!r}, but the layer {owner!r} none, so "
                f"nothing puts the parts together. Give the style to {owner!r}."
            )


def gather_parts(plan: Plan, model: nn.Module, layout: ModelLayout) -> None:
    """Gather what column-parallel layers outside of blocks give where nothing takes it in parts: heads, above all.

    The model's caller sees that output, and a loss of a part of the logits would be another one on each rank.
    """
    blocks = frozenset(layout.blocks)
    outside = {name: style for name, style in plan.modules.items() if layout.part_of(f"{name}.weight") not in blocks}
    is_taken = any(style in ("rowwise", "packed_rowwise") for style in outside.values())
    for name in [name for name, style in outside.items() if style == "colwise"]:
        if name == layout.head or not is_taken:
            plan.name(name, "colwise_gather_output", model)


def is_read(model: nn.Module, name: str) -> bool:
    """Whether the code around a layer reads its weight, which then must be whole, instead of calling it."""
    parent, _, own = name.rpartition(".")
    try:
        source = inspect.getsource(type(model.get_submodule(parent)))
    except (OSError, TypeError):
        return True
    return re.search(rf"\.{re.escape(own)}\.(weight|bias)\b", source) is not None

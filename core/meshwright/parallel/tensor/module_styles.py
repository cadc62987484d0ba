"""A tensor-parallel plan of one model: which modules and parameters have which style."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn
from transformers.pytorch_utils import Conv1D

from ..._compat.peft import base_name
from ...base.errors import ConfigError
from ...model.layout import ModelLayout
from .adapters import IN, OUT, spread
from .styles import STYLES, Style


@dataclass
class Plan:
    """Styles by the full names of modules and parameters.

    Attributes:
        source: of the plan, for errors.
        modules: style of each module that is named.
        parameters: style of each parameter: its own, or its module's.
        shards_positions: whether a style of torch in the plan asks for sequence parallelism.
        is_given: whether a user or a plugin wrote it.
    """

    source: str
    modules: dict[str, str] = field(default_factory=dict)
    parameters: dict[str, str] = field(default_factory=dict)
    shards_positions: bool = False
    is_given: bool = False

    def style(self, module: str) -> Style | None:
        """Return the style of a module, if it has one."""
        name = self.modules.get(module)
        return None if name is None else STYLES[name]

    def names(self, module: str, model: nn.Module) -> list[str]:
        """Return the styles of a module, or of its original and trained copies."""
        return [self.modules[each] for each, _ in spread(model, module, "replicate") if each in self.modules]

    def name(self, module: str, style: str, model: nn.Module) -> None:
        """Set the style of a module and of its parameters."""
        for name, parameters in spread(model, module, style):
            self.modules[name] = style
            self.parameters.update(parameters)

    def drop(self, module: str, model: nn.Module) -> None:
        """Leave a module and its parameters replicated."""
        for name, parameters in spread(model, module, "replicate"):
            self.modules.pop(name, None)
            for parameter in parameters:
                self.parameters.pop(parameter, None)

    def has_inside(self, module: str) -> bool:
        """Return whether a module, or one inside it, has a style."""
        return any(each == module or each.startswith(f"{module}.") for each in self.modules)


def spellings(name: str) -> Iterator[str]:
    """Yield what a plan may call a module or parameter: its name, or that in the base model of an adapted one."""
    yield from (name, wildcards(name))
    # A wrapper has the name of the layer it wraps; layers inside of it have no name in a plan.
    if not name.endswith((".base_layer", ".modules_to_save")):
        yield from (base_name(name), wildcards(base_name(name)))


def wildcards(name: str) -> str:
    """Replace each number in a name by `*`."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def without_base_layer(name: str) -> str:
    """Return the name of the outermost wrapper of a layer."""
    while name.endswith(".base_layer"):
        name = name.removesuffix(".base_layer")
    return name


def check_layers_are_named(plan: Plan, model: nn.Module) -> None:
    """Raise ConfigError if a plan shards the weight of a layer, but has no style for the layer's communication."""
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
    """Gather the output of column-parallel layers outside of blocks, above all heads, unless a layer takes it in parts.

    The model's caller sees that output, and the loss of some of the logits would differ between ranks.
    """
    blocks = frozenset(layout.blocks)
    outside = {name: style for name, style in plan.modules.items() if layout.part_of(f"{name}.weight") not in blocks}
    is_taken = any(style in ("rowwise", "packed_rowwise") for style in outside.values())
    for name in [name for name, style in outside.items() if style == "colwise"]:
        if name == layout.head or not is_taken:
            plan.name(name, "colwise_gather_output", model)


def is_read(model: nn.Module, name: str) -> bool:
    """Return whether the code around a layer reads its weight, which must be full then, instead of calling it."""
    parent, _, own = name.rpartition(".")
    try:
        source = inspect.getsource(type(model.get_submodule(parent)))
    except (OSError, TypeError):
        return True
    return re.search(rf"\.{re.escape(own)}\.(weight|bias)\b", source) is not None

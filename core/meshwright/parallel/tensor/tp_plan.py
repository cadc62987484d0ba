"""The tensor-parallel plan of one model: styles by module and parameter, including peft adapters.

An adapted layer's style wraps the adapter, so the layer and its low-rank matrices A and B share communication. For a
column-parallel layer, B is sharded along the output and A is replicated. For a row-parallel layer, A is sharded along
the input and B is replicated. Replicated matrices are used with sharded activations, so their gradients are
all-reduced. The mask of a dropout before a sharded A is sampled for the full input on every rank, so masks equal those
of one process.
Source: Hu et al. 2021, arXiv:2106.09685; Shoeybi et al. 2019, arXiv:1909.08053, section 3.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from ..._compat.peft import (
    LoraLayer,
    describe_lora_layer,
    iter_tuner_layers,
    list_copies,
    patch_dora_norms,
    to_base_name,
    unwrap_base_layer,
)
from ..._compat.torch import all_reduce, get_own_parameters
from ...base.errors import ConfigError
from ...model.forward_order import WrapOrder
from ...model.layout import ModelLayout
from ...tensors.ops import temporary_parameters
from .. import ForwardMethod, wrap_forward_if
from .collectives import chunk_sizes
from .styles import STYLES, TensorParallelContext, TensorParallelStyle

PARTIAL_GRAD_STYLE = "replicated_with_grad_allreduce"
COLUMN_STYLES = ("colwise", "colwise_gather_output", "colwise_rep", "packed_colwise", "embedding_colwise")
"""Styles that shard a layer's output."""
ROW_STYLES = ("rowwise", "rowwise_split_input", "rowwise_rep", "packed_rowwise", "embedding_rowwise")
"""Styles that shard a layer's input."""


@dataclass
class TensorParallelPlan:
    """Styles by the full names of modules and parameters.

    Attributes:
        source: where the plan comes from, for error messages.
        parameter_styles: style of each parameter: its own or its module's.
        uses_sequence_parallel: whether a torch style in the plan requires sequence parallelism.
        is_user_provided: whether a user or a plugin wrote the plan.
    """

    source: str
    module_styles: dict[str, str] = field(default_factory=dict)
    parameter_styles: dict[str, str] = field(default_factory=dict)
    uses_sequence_parallel: bool = False
    is_user_provided: bool = False

    def get_style(self, module: str) -> TensorParallelStyle | None:
        """Return the style of a module, or None."""
        name = self.module_styles.get(module)
        return None if name is None else STYLES[name]

    def get_style_names(self, module: str, model: nn.Module) -> list[str]:
        """Return the styles of a module, or of its original and trained copies."""
        return [
            self.module_styles[each]
            for each, _ in expand_style(model, module, "replicate")
            if each in self.module_styles
        ]

    def set_style(self, module: str, style: str, model: nn.Module) -> None:
        """Set the style of a module and of its parameters."""
        for name, parameters in expand_style(model, module, style):
            self.module_styles[name] = style
            self.parameter_styles.update(parameters)

    def replicate(self, module: str, model: nn.Module) -> None:
        """Remove the styles of a module and its parameters, so that they are replicated."""
        for name, parameters in expand_style(model, module, "replicate"):
            self.module_styles.pop(name, None)
            for parameter in parameters:
                self.parameter_styles.pop(parameter, None)

    def has_style_within(self, module: str) -> bool:
        """Return whether a module or one of its submodules has a style."""
        return any(each == module or each.startswith(f"{module}.") for each in self.module_styles)


def iter_aliases(name: str) -> Iterator[str]:
    """Yield the names that a plan may use for a module or parameter: its own, and that in the base model."""
    yield from (name, replace_indices(name))
    # A wrapper has the name of the layer that it wraps; layers inside of it have no name in a plan.
    if not name.endswith((".base_layer", ".modules_to_save")):
        yield from (to_base_name(name), replace_indices(to_base_name(name)))


def replace_indices(name: str) -> str:
    """Replace each number in a dotted name by `*`."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def strip_base_layer(name: str) -> str:
    """Return the name of the outermost wrapper of a layer."""
    return re.sub(r"(\.base_layer)+$", "", name)


def check_layers_have_styles(plan: TensorParallelPlan, model: nn.Module) -> None:
    """Raise ConfigError if a plan shards the weight of a layer that has no style for its communication."""
    for name, style in plan.parameter_styles.items():
        path = name.rpartition(".")[0]
        owner = path.removesuffix(".base_layer")
        is_layer = type(model.get_submodule(path)) in (nn.Linear, nn.Embedding, Conv1D)
        if (
            is_layer
            and style in (*COLUMN_STYLES, *ROW_STYLES)
            and owner not in plan.module_styles
            and not is_weight_read(model, owner)
        ):
            raise ConfigError(
                f"{plan.source} gives the parameter {name!r} the style {style!r}, but the layer {owner!r} none, so "
                f"nothing puts the parts together. Give the style to {owner!r}."
            )


def gather_column_outputs(plan: TensorParallelPlan, model: nn.Module, layout: ModelLayout) -> None:
    """Gather the output of column-parallel layers outside of blocks, such as the head, unless a layer takes it sharded.

    The model's caller gets that output, and a loss of sharded logits would differ between ranks.
    """
    blocks = frozenset(layout.blocks)
    outside = {
        name: style for name, style in plan.module_styles.items() if layout.find_part(f"{name}.weight") not in blocks
    }
    has_rowwise = any(style in ("rowwise", "packed_rowwise") for style in outside.values())
    for name in [name for name, style in outside.items() if style == "colwise"]:
        if name == layout.head or not has_rowwise:
            plan.set_style(name, "colwise_gather_output", model)


def is_weight_read(model: nn.Module, name: str) -> bool:
    """Return whether a layer's parent reads its weight, which must then be unsharded, instead of calling the layer."""
    parent, _, own = name.rpartition(".")
    try:
        source = inspect.getsource(type(model.get_submodule(parent)))
    except (OSError, TypeError):
        return True
    return re.search(rf"\.{re.escape(own)}\.(weight|bias)\b", source) is not None


# -- adapters


def expand_style(model: nn.Module, module: str, style: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the modules that a style wraps, each with the styles of its parameters: one module, or its copies."""
    for name in list_copies(model, module):
        wrapper = model.get_submodule(name)
        adapter = describe_lora_layer(wrapper)
        path = get_base_layer_name(model, name) if adapter is not None else name
        styles = {f"{path}.{each}": style for each, _ in model.get_submodule(path).named_parameters(recurse=False)}
        if adapter is not None and adapter.parameter_name is None:
            styles |= {f"{name}.{each}": own for each, own in _iter_adapter_styles(adapter, style)}
        yield name, styles


def find_adapter_styles(model: nn.Module, parameters: Mapping[str, str], excluded: Iterable[str]) -> dict[str, str]:
    """Return the styles of adapters of single parameters, derived from the parameters' styles.

    `excluded` names modules that are sharded by another axis, and whose inputs are sharded over the ranks.
    """
    styles: dict[str, str] = {}
    excluded_names = set(excluded)
    for name, module in model.named_modules():
        adapter = describe_lora_layer(module)
        if adapter is not None and adapter.parameter_name is not None:
            path = get_base_layer_name(model, name)
            style = PARTIAL_GRAD_STYLE if path in excluded_names else parameters.get(f"{path}.{adapter.parameter_name}")
            styles |= (
                {f"{name}.{each}": s for each, s in _iter_adapter_styles(adapter, style)} if style is not None else {}
            )
    return styles


def has_unknown_wrappers(model: nn.Module) -> bool:
    """Return whether a layer has a wrapper that is not a low-rank adapter."""
    return any(describe_lora_layer(layer) is None for _, layer in iter_tuner_layers(model))


def find_wrapped_modules(model: nn.Module) -> set[str]:
    """Return the names of the modules within a tuner's wrappers."""
    return {f"{name}.{each}" for name, layer in iter_tuner_layers(model) for each, _ in layer.named_modules() if each}


def get_base_layer(model: nn.Module, name: str) -> nn.Module:
    """Return the base layer at a name, without adapters."""
    module = model.get_submodule(list_copies(model, name)[0])
    return unwrap_base_layer(module) if describe_lora_layer(module) is not None else module


def get_base_layer_name(model: nn.Module, name: str) -> str:
    """Return the name of the base layer inside a tuner's wrappers."""
    outer = model.get_submodule(name)
    while outer is not unwrap_base_layer(outer):
        outer, name = outer.base_layer, f"{name}.base_layer"
    return name


def _iter_adapter_styles(layer: LoraLayer, style: str) -> Iterator[tuple[str, str]]:
    """Yield names, relative to the wrapper, and styles of an adapter's parameters, given the base layer's style."""
    shards_output, shards_input = style in COLUMN_STYLES, style in ROW_STYLES
    if layer.is_transposed:
        shards_output, shards_input = shards_input, shards_output
    packed = "packed_" if style.startswith("packed") else ""
    other_style = PARTIAL_GRAD_STYLE if shards_output or shards_input else style
    for name in layer.output_params:
        yield name, f"{packed}colwise" if shards_output else other_style
    for name in layer.input_params:
        yield name, f"{packed}rowwise" if shards_input else other_style


def replace_by_wrappers(model: nn.Module, modules: set[nn.Module]) -> set[nn.Module]:
    """Replace modules that are never called, since a wrapper reads their parameters, by the wrapper."""
    found = set(modules)
    for _, layer in iter_tuner_layers(model):
        adapter = describe_lora_layer(layer)
        if adapter is not None:
            read = {
                layer.get_submodule(each.rpartition(".")[0]) for each in (*adapter.output_params, *adapter.input_params)
            }
            read = {each for each in read if adapter.parameter_name is not None or isinstance(each, nn.ParameterDict)}
            found = (found - read) | {layer} if found & read else found
    return found


def shard_adapter_input(tp: TensorParallelContext, adapter: LoraLayer, is_active: Callable[[], bool]) -> None:
    """Let the adapter of a layer with sharded input compute on this rank's shard while `is_active()`; in place."""
    wrap = functools.partial(wrap_forward_if, order=WrapOrder.TENSOR, is_active=is_active)
    for bias in adapter.biases:
        wrap(bias, wrapper=functools.partial(_run_with_split_bias, tp.size, bias))
    for dropout in adapter.dropouts:
        wrap(dropout, wrapper=functools.partial(_run_sharded_dropout, tp, adapter, dropout))
    for magnitude in adapter.magnitudes:
        patch_dora_norms(magnitude, lambda squares: all_reduce(squares, "sum", tp.group), is_active)


def _run_with_split_bias(size: int, module: nn.Module, forward: ForwardMethod, x: Tensor) -> Any:
    """Add 1/size of the bias on each rank."""
    bias = get_own_parameters(module)["bias"]
    with temporary_parameters([(module, "bias", None if bias is None else bias / size)]):
        return forward(x)


def _run_sharded_dropout(
    parallel: TensorParallelContext, layer: LoraLayer, module: Any, forward: ForwardMethod, x: Tensor
) -> Any:
    """Apply this rank's slice of a mask that is sampled for the full input."""
    if not module.training or module.p == 0:
        return x
    sizes = chunk_sizes(layer.in_features, parallel.size)
    mask = F.dropout(torch.ones(*x.shape[:-1], layer.in_features, dtype=x.dtype, device=x.device), module.p)
    return x * mask.narrow(-1, sum(sizes[: parallel.rank]), sizes[parallel.rank])

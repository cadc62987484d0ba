"""Where a model's tensor-parallel plan comes from, and which modules and parameters it names.

Sources, the first that answers: a dict or an import path from the user, the hook `tp_plan`, the model's own plan, and
last a plan that follows from structure alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
)
from transformers.pytorch_utils import Conv1D

from ..._compat.peft import base_name
from ...base.errors import ConfigError, ModelError, nearest
from ...model.layout import ModelLayout
from ...strategy.hooks import StyleName
from ...strategy.registry import Registry, get_registry
from .adapters import has_other_wrappers, layer_at, parts_of_wrappers
from .collectives import chunk_sizes
from .module_styles import Plan
from .names import spellings, wildcards
from .plan_checks import check_layers_are_named, gather_parts, is_read
from .plan_sources import imported_plan, plans_within
from .styles import STYLES, out_features
from .torch_styles import own_style, shards_positions


def find_plan(
    model: nn.Module,
    layout: ModelLayout,
    given: Mapping[str, StyleName] | str | None = None,
    *,
    sequence_parallel: bool = False,
    registry: Registry | None = None,
) -> Plan:
    """The plan for a model.

    Args:
        model: before sharding.
        layout: of the model.
        given: a dict from names to styles, in which `*` stands for a number; or an import path of such a dict, or of
            a function that returns one, which is called with the model if it takes an argument.
        sequence_parallel: told to the hook.
        registry: whose plugins are asked.

    Raises:
        ConfigError: `given` names a style or a module that does not exist, or gives a style of torch that no style of
            meshwright is equal to.
        ModelError: a plan names a style that its module cannot have.
    """
    if isinstance(given, str):
        return _expanded(model, layout, imported_plan(given, model), f"tp_plan={given!r}", strict=True)
    if given is not None:
        return _expanded(model, layout, given, "tp_plan", strict=True)
    registry = registry or get_registry()
    answer = registry.hook.tp_plan(model=model, layout=layout, sequence_parallel=sequence_parallel)
    if answer is not None:
        return _expanded(model, layout, answer, "a plugin's tp_plan hook", strict=True)
    own = plans_within(model)
    plan = _expanded(model, layout, own, f"the tp_plan of {type(model).__name__}", strict=False)
    _correct(plan, model)
    ends = {base_name(each) for each in (layout.head, layout.embedding) if each}
    if all(base_name(name) in ends for name in plan.modules) or has_other_wrappers(model):
        plan = Plan("structure")
        for name in _linear_layers(model, layout):
            plan.name(name, "colwise_gather_output", model)
    _add_vocabulary(plan, model, layout)
    _add_activations(plan, model)
    _add_tied(plan, model, layout)
    if not plan.parameters:
        raise ModelError(
            f"{type(model).__name__} has no tensor-parallel plan, and no linear layers or embedding that one could be "
            f"derived from. Give a tp_plan, or set tp_size=1."
        )
    return plan


def keep_small_layers_whole(plan: Plan, model: nn.Module, size: int) -> None:
    """Take layers whose output is gathered out of the plan where a rank would have nothing of them.

    `fully_shard` cannot reduce parameters without elements.
    """
    for name, style in list(plan.modules.items()):
        if style not in ("colwise_gather_output", "colwise_rep"):
            continue
        features = out_features(model.get_submodule(name))
        if chunk_sizes(features, size)[-1] == 0:
            plan.drop(name, model)


def translate_to_torch_parallel_style(style: str) -> ParallelStyle:
    """The style of torch that a name in a plan stands for.

    Raises:
        ConfigError: no such style, or one that torch has no equal of, which our own `tp_plan` takes by name.
    """
    equals: dict[str, Callable[[], ParallelStyle]] = {
        "colwise": ColwiseParallel,
        "rowwise": RowwiseParallel,
        "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
        "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
        "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
        "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
        "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
        "embedding_colwise": lambda: ColwiseParallel(output_layouts=Replicate()),
        "sequence_parallel": SequenceParallel,
    }
    if str(style) in equals:
        return equals[style]()
    if str(style) in STYLES:
        raise ConfigError(
            f"style {style!r} has no equal in torch.distributed.tensor.parallel. Use it by its name in a tp_plan; "
            f"torch has: {', '.join(equals)}."
        )
    hint = nearest(str(style), STYLES)
    raise ConfigError(f"unknown tensor-parallel style {style!r}.{hint} Known: {', '.join(STYLES)}.")


def _expanded(
    model: nn.Module, layout: ModelLayout, values: Mapping[str, StyleName], source: str, *, strict: bool
) -> Plan:
    """Match every module and parameter of the model with the names of a plan, and use styles of our own alone."""
    for name, style in values.items():
        if isinstance(style, str) and style not in STYLES:
            raise ConfigError(
                f"{source} gives {name!r} the unknown style {style!r}.{nearest(style, STYLES)} "
                f"Known: {', '.join(STYLES)}."
            )
        if not isinstance(style, str | ParallelStyle):
            raise ConfigError(
                f"{source} gives {name!r} a {type(style).__name__}, not a style's name or a ParallelStyle of torch."
            )
    plan, met = Plan(source, shards_positions=shards_positions(values.values()), is_given=strict), set()
    for name, module in model.named_modules():
        key = next((each for each in spellings(name) if each in values), None)
        if key is not None and name:
            met.add(key)
            style = _own(values[key], name, layer_at(model, name), layout, source)
            # What stands in for a layer on another stage of a pipeline has nothing to shard.
            if style is not None and (not STYLES[style].needs or any(True for _ in module.parameters())):
                plan.name(name, style, model)
        for parameter, _ in module.named_parameters(recurse=False):
            full = f"{name}.{parameter}" if name else parameter
            own = next((each for each in spellings(full) if each in values), None)
            if own is not None:
                met.add(own)
                style = _own(values[own], full, module, layout, source)
                if style is not None:
                    plan.parameters[full] = style
        # What another stage of a pipeline has.
        elsewhere = (f"{name}.{each}" for each in getattr(module, "names_elsewhere", ()))
        met.update(each for full in elsewhere for each in spellings(full))
    unmet = [name for name in values if name not in met]
    if strict and unmet:
        names = {wildcards(name) for name, _ in model.named_modules()}
        raise ConfigError(
            f"{source} names {unmet[0]!r}, which is no module or parameter of {type(model).__name__}."
            f"{nearest(unmet[0], names)} `*` stands for the number of a layer."
        )
    for name in plan.modules:
        style = plan.style(name)
        module = layer_at(model, name)
        if style is not None and style.needs and not any(hasattr(module, each) for each in style.needs):
            raise ModelError(
                f"{source} gives {name} ({type(module).__name__}) the style {plan.modules[name]!r}, which needs a "
                f"module with {' or '.join(style.needs)}. Change the plan."
            )
    if strict:
        check_layers_are_named(plan, model)
    gather_parts(plan, model, layout)
    return plan


def _own(style: StyleName, name: str, module: nn.Module, layout: ModelLayout, source: str) -> str | None:
    if isinstance(style, str):
        return style
    return own_style(style, name, module, is_head=name == layout.head, source=source)


def _linear_layers(model: nn.Module, layout: ModelLayout) -> Iterator[str]:
    """Linear layers of blocks. Their outputs are gathered, so nothing need be known of what stands between them."""
    within = parts_of_wrappers(model)
    for block in layout.blocks:
        for name, _ in model.get_submodule(block).named_modules(prefix=block):
            # Subclasses may compute something else.
            is_linear = name not in within and type(layer_at(model, name)) in (nn.Linear, Conv1D)
            if is_linear and not is_read(model, name):
                yield name


def _correct(plan: Plan, model: nn.Module) -> None:
    """Replace styles of the model's own plan with which it would compute something else."""
    corrections = _corrections().get(getattr(text_config(model), "model_type", ""), {})
    for names in (plan.modules, plan.parameters):
        for name in names:
            for end, style in corrections.items():
                if f".{wildcards(base_name(name))}".endswith(f".{end}"):
                    names[name] = style
    for name, style in list(plan.modules.items()):
        # A module's parameters follow it.
        if style in corrections.values() and STYLES[style].needs:
            plan.name(name, style, model)


@functools.cache
def _corrections() -> dict[str, dict[str, str]]:
    values = yaml.safe_load((Path(__file__).parent / "corrections.yaml").read_text())
    return dict(values)


def _add_vocabulary(plan: Plan, model: nn.Module, layout: ModelLayout) -> None:
    """Shard embedding and head along the vocabulary where the plan does not name them, tied ones alike."""
    # Without a head of its own, a model may use the embedding's weight in ways that cannot be seen.
    if layout.embedding is None or layout.head is None or layout.head == layout.embedding:
        return
    embedding, head = layer_at(model, layout.embedding), layer_at(model, layout.head)
    if isinstance(embedding, nn.Embedding) and not plan.names(layout.embedding, model):
        plan.name(layout.embedding, "embedding_rowwise", model)
    if type(head) is nn.Linear and not plan.names(layout.head, model):
        plan.name(layout.head, "colwise_gather_output", model)


def _add_activations(plan: Plan, model: nn.Module) -> None:
    """Sum the gradients of what no plan names but meets sharded activations: an activation function's own parameter
    between column- and row-parallel layers, and what follows the lookup within an embedding."""
    within = parts_of_wrappers(model)
    for name, style in list(plan.modules.items()):
        if style == "embedding_rowwise":
            for child, module in model.get_submodule(name).named_modules(prefix=name):
                if child != name and child not in within and any(True for _ in module.parameters(recurse=False)):
                    plan.name(child, "replicated_with_grad_allreduce", model)
    parents = dict.fromkeys(name.rpartition(".")[0] for name, style in plan.modules.items() if style == "colwise")
    for parent in parents:
        for name, module in model.get_submodule(parent).named_children():
            own = list(module.parameters())
            path = f"{parent}.{name}"
            if path not in plan.modules and own and all(parameter.numel() == 1 for parameter in own):
                plan.name(path, "replicated_with_grad_allreduce", model)


def _add_tied(plan: Plan, model: nn.Module, layout: ModelLayout) -> None:
    """Where one name of a tied parameter is sharded, shard the others; where that may be wrong, shard none."""
    for names in layout.tied:
        owners = {name: model.get_submodule(name.rpartition(".")[0]) for name in names}
        if not any(name in plan.parameters for name in names):
            continue
        for name, owner in owners.items():
            module = name.rpartition(".")[0]
            while module.endswith(".base_layer"):
                module = module.removesuffix(".base_layer")
            if name in plan.parameters:
                continue
            if isinstance(owner, nn.Embedding):
                plan.name(module, "embedding_rowwise", model)
            elif type(owner) is nn.Linear:
                plan.name(module, "colwise_gather_output", model)
            elif model.get_parameter(name).dim() == 1:
                # A second name for a bias, which the layer that it belongs to uses.
                plan.parameters[name] = next(plan.parameters[each] for each in names if each in plan.parameters)
            else:
                for each in names:
                    plan.drop(each.rpartition(".")[0], model)
                    plan.parameters.pop(each, None)
                break


def text_config(model: nn.Module) -> Any:
    """The configuration of a model of transformers, or of its text part."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config

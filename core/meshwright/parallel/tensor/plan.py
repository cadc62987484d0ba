"""Where a model's tensor-parallel plan comes from, and which modules and parameters it names.

Sources, the first that answers: a dict or an import path from the user, the hook `tp_plan`, the model's own plan, and
last a plan that follows from structure alone.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle
from transformers.pytorch_utils import Conv1D

from ..._compat.peft import base_name
from ...base.errors import ConfigError, MissingPlanError, ModelError, nearest
from ...files.class_paths import import_class_from_path
from ...model.layout import ModelLayout
from ...strategy.hooks import StyleName
from ...strategy.registry import Registry, get_registry, model_layout
from .collectives import chunk_sizes
from .module_styles import (
    Plan,
    check_layers_are_named,
    gather_parts,
    has_other_wrappers,
    is_read,
    layer_at,
    parts_of_wrappers,
    spellings,
    wildcards,
    without_base_layer,
)
from .styles import STYLES, NamedStyle, out_features, own_style, shards_positions, translate_to_torch_parallel_style


def find_plan(
    model: nn.Module,
    layout: ModelLayout,
    given: Mapping[str, StyleName] | str | None = None,
    *,
    sequence_parallel: bool = False,
    registry: Registry | None = None,
) -> Plan:
    """Return the plan for an unsharded model: the given one, the first that a plugin of `registry` gives, or its own.

    `given` is a dict from names to styles, in which `*` stands for a number, or an import path of such a dict, or of a
    function that returns one, which is called with the model if it takes an argument.

    Raises:
        ConfigError: `given` names a style or a module that does not exist, or a style of torch that no style of
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
    """Drop layers whose output is gathered from the plan where a rank would have an empty shard.

    `fully_shard` cannot reduce parameters without elements.
    """
    for name, style in list(plan.modules.items()):
        is_gathered = style in ("colwise_gather_output", "colwise_rep")
        if is_gathered and chunk_sizes(out_features(model.get_submodule(name)), size)[-1] == 0:
            plan.drop(name, model)


def plans_within(model: nn.Module) -> dict[str, StyleName]:
    """Merge the plans of the models of transformers in a model; outer ones override inner ones."""
    plans = [(name, getattr(module, "tp_plan", None)) for name, module in reversed(list(model.named_modules()))]
    return {
        f"{name}.{key}" if name else key: style
        for name, plan in plans
        if isinstance(plan, Mapping)
        for key, style in plan.items()
    }


def imported_plan(path: str, model: nn.Module) -> Mapping[str, StyleName]:
    """Return the plan at an import path, a dict or what a function gives; ConfigError if there is none."""
    found = import_class_from_path(path, kind=("dict", "function"))
    if callable(found):
        parameters = inspect.signature(found).parameters.values()
        variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        required = [each for each in parameters if each.default is each.empty and each.kind not in variadic]
        if len(required) > 1 or any(each.kind is each.KEYWORD_ONLY for each in required):
            raise ConfigError(
                f"tp_plan={path!r} is a function that needs {', '.join(each.name for each in required)}, but it is "
                f"called with the model, or with nothing. Give its other arguments defaults."
            )
        takes_model = any(each.kind not in (each.KEYWORD_ONLY, each.VAR_KEYWORD) for each in parameters)
        found = found(model) if takes_model else found()
    if not isinstance(found, Mapping):
        raise ConfigError(f"tp_plan={path!r} is a {type(found).__name__}, not a dict or a function returning one.")
    return found


def _expanded(
    model: nn.Module, layout: ModelLayout, values: Mapping[str, StyleName], source: str, *, strict: bool
) -> Plan:
    """Match modules and parameters of the model with the names of a plan, and translate styles of torch."""
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
            style = own_style(values[key], name, layer_at(model, name), is_head=name == layout.head, source=source)
            # The placeholder of a layer on another pipeline stage has nothing to shard.
            if style is not None and (not STYLES[style].needs or any(True for _ in module.parameters())):
                plan.name(name, style, model)
        for parameter, _ in module.named_parameters(recurse=False):
            full = f"{name}.{parameter}" if name else parameter
            own = next((each for each in spellings(full) if each in values), None)
            if own is not None:
                met.add(own)
                style = own_style(values[own], full, module, is_head=full == layout.head, source=source)
                if style is not None:
                    plan.parameters[full] = style
        # Names on other pipeline stages.
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


def _linear_layers(model: nn.Module, layout: ModelLayout) -> Iterator[str]:
    """Yield the linear layers of blocks, whose outputs are gathered, whatever stands between them."""
    within = parts_of_wrappers(model)
    for block in layout.blocks:
        for name, _ in model.get_submodule(block).named_modules(prefix=block):
            # Subclasses may compute something else.
            is_linear = name not in within and type(layer_at(model, name)) in (nn.Linear, Conv1D)
            if is_linear and not is_read(model, name):
                yield name


def _correct(plan: Plan, model: nn.Module) -> None:
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
    return dict(yaml.safe_load((Path(__file__).parent / "corrections.yaml").read_text()))


def _add_vocabulary(plan: Plan, model: nn.Module, layout: ModelLayout) -> None:
    """Shard embedding and head along the vocabulary where the plan does not name them, tied or not."""
    # Without a head of its own, a model may use the embedding's weight in unknown ways.
    if layout.embedding is None or layout.head is None or layout.head == layout.embedding:
        return
    embedding, head = layer_at(model, layout.embedding), layer_at(model, layout.head)
    if isinstance(embedding, nn.Embedding) and not plan.names(layout.embedding, model):
        plan.name(layout.embedding, "embedding_rowwise", model)
    if type(head) is nn.Linear and not plan.names(layout.head, model):
        plan.name(layout.head, "colwise_gather_output", model)


def _add_activations(plan: Plan, model: nn.Module) -> None:
    """Sum the gradients of parameters that meet sharded activations but are in no plan: those of activation functions
    between column- and row-parallel layers, and of what follows the lookup within an embedding."""
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
    """If one name of a tied parameter is sharded, shard the others too; if that may be wrong, shard none."""
    for names in layout.tied:
        owners = {name: model.get_submodule(name.rpartition(".")[0]) for name in names}
        if not any(name in plan.parameters for name in names):
            continue
        for name, owner in owners.items():
            module = without_base_layer(name.rpartition(".")[0])
            if name in plan.parameters:
                continue
            if isinstance(owner, nn.Embedding):
                plan.name(module, "embedding_rowwise", model)
            elif type(owner) is nn.Linear:
                plan.name(module, "colwise_gather_output", model)
            elif model.get_parameter(name).dim() == 1:
                # A second name of a bias that belongs to a layer.
                plan.parameters[name] = next(plan.parameters[each] for each in names if each in plan.parameters)
            else:
                for each in names:
                    plan.drop(each.rpartition(".")[0], model)
                    plan.parameters.pop(each, None)
                break


def text_config(model: nn.Module) -> Any:
    """Return the configuration of a model of transformers, or of its text part."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def get_hf_tp_shard_plan(model: nn.Module) -> dict[str, ParallelStyle]:
    """Return the model's own plan, as styles that `torch.distributed.tensor.parallel.parallelize_module` takes.

    Strategies use the same plan where none is given. A style without an equal in torch, such as those of experts, is a
    `NamedStyle`, which `tp_plan` takes and torch refuses.

    Args:
        model: a model of transformers, or one that has such models inside, whose plans are merged.

    Returns:
        Style by the name of a module or parameter; `*` stands for a number.

    Raises:
        MissingPlanError: the model has no plan.
    """
    if not plans_within(model):
        raise MissingPlanError(
            f"{type(model).__name__} has no tensor-parallel plan of its own (tp_plan). Give one as a dict."
        )
    plan = find_plan(model, model_layout(model), registry=Registry([]))
    # What follows from the styles of modules is not repeated.
    implied = Plan(plan.source)
    for name, style in plan.modules.items():
        implied.name(name, style, model)
    single = {name: style for name, style in plan.parameters.items() if implied.parameters.get(name) != style}
    modules = _merged(plan.modules, [name for name, _ in model.named_modules()])
    parameters = _merged(single, [name for name, _ in model.named_parameters(remove_duplicate=False)])
    found: dict[str, ParallelStyle] = {}
    for name, style in (modules | parameters).items():
        try:
            found[name] = translate_to_torch_parallel_style(style)
        except ConfigError:
            found[name] = NamedStyle(style)
    return found


def _merged(styles: dict[str, str], names: list[str]) -> dict[str, str]:
    """Merge the entries of names that differ in numbers alone, where all of them have one style."""
    alike: dict[str, set[str | None]] = {}
    for name in names:
        alike.setdefault(wildcards(name), set()).add(styles.get(name))
    return {
        wildcards(name) if len(alike.get(wildcards(name), ())) == 1 else name: style for name, style in styles.items()
    }

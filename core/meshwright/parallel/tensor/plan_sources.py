"""Sources of a model's tensor-parallel plan, and the modules and parameters that its names match.

The first available source is used: a dict or an import path from the user, the hook `tp_plan`, the model's own plan,
and finally a plan derived from the model's structure.
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

from ..._compat.peft import to_base_name
from ...base.errors import ConfigError, MissingPlanError, ModelError, suggest_match
from ...files.class_paths import import_class_from_path
from ...model.layout import ModelLayout
from ...strategy.hooks import StyleSpec
from ...strategy.registry import Registry, get_registry, model_layout
from .collectives import chunk_sizes
from .styles import (
    STYLES,
    NamedStyle,
    get_out_features,
    resolve_style,
    translate_to_torch_parallel_style,
    uses_sequence_parallel,
)
from .tp_plan import (
    TensorParallelPlan,
    check_layers_have_styles,
    find_wrapped_modules,
    gather_column_outputs,
    get_base_layer,
    has_unknown_wrappers,
    is_weight_read,
    iter_aliases,
    replace_indices,
    strip_base_layer,
)


def find_plan(
    model: nn.Module,
    layout: ModelLayout,
    user_plan: Mapping[str, StyleSpec] | str | None = None,
    *,
    sequence_parallel: bool = False,
    registry: Registry | None = None,
) -> TensorParallelPlan:
    """Return the plan for an unsharded model: the user's, the first one of a plugin in `registry`, or the model's own.

    Args:
        user_plan: a dict from names to styles, where `*` matches a number; or the import path of such a dict, or of a
            function that returns one. The function is called with the model if it takes an argument.

    Raises:
        ConfigError: `user_plan` names a style or a module that does not exist, or a torch style without a meshwright
            equivalent.
        ModelError: a plan gives a module a style that does not support it.
    """
    if isinstance(user_plan, str):
        return _expand_plan(model, layout, import_plan(user_plan, model), f"tp_plan={user_plan!r}", is_strict=True)
    if user_plan is not None:
        return _expand_plan(model, layout, user_plan, "tp_plan", is_strict=True)
    registry = registry or get_registry()
    plugin_plan = registry.hook.tp_plan(model=model, layout=layout, sequence_parallel=sequence_parallel)
    if plugin_plan is not None:
        return _expand_plan(model, layout, plugin_plan, "a plugin's tp_plan hook", is_strict=True)
    model_plan = merge_model_plans(model)
    plan = _expand_plan(model, layout, model_plan, f"the tp_plan of {type(model).__name__}", is_strict=False)
    _apply_corrections(plan, model)
    ends = {to_base_name(each) for each in (layout.head, layout.embedding) if each}
    if all(to_base_name(name) in ends for name in plan.module_styles) or has_unknown_wrappers(model):
        plan = TensorParallelPlan("structure")
        for name in _iter_linear_layers(model, layout):
            plan.set_style(name, "colwise_gather_output", model)
    _add_vocabulary(plan, model, layout)
    _add_activations(plan, model)
    _add_tied(plan, model, layout)
    if not plan.parameter_styles:
        raise ModelError(
            f"{type(model).__name__} has no tensor-parallel plan, and no linear layers or embedding that one could be "
            f"derived from. Give a tp_plan, or set tp_size=1."
        )
    return plan


def replicate_small_layers(plan: TensorParallelPlan, model: nn.Module, size: int) -> None:
    """Remove output-gathered layers from the plan if a rank would have an empty shard.

    `fully_shard` cannot reduce parameters without elements.
    """
    for name, style in list(plan.module_styles.items()):
        is_gathered = style in ("colwise_gather_output", "colwise_rep")
        if is_gathered and chunk_sizes(get_out_features(model.get_submodule(name)), size)[-1] == 0:
            plan.replicate(name, model)


def merge_model_plans(model: nn.Module) -> dict[str, StyleSpec]:
    """Merge the plans of all transformers models within a model; outer ones override inner ones."""
    plans = [(name, getattr(module, "tp_plan", None)) for name, module in reversed(list(model.named_modules()))]
    return {
        f"{name}.{key}" if name else key: style
        for name, plan in plans
        if isinstance(plan, Mapping)
        for key, style in plan.items()
    }


def import_plan(path: str, model: nn.Module) -> Mapping[str, StyleSpec]:
    """Import a plan: a dict, or what a function returns; raise ConfigError if it is neither."""
    imported = import_class_from_path(path, kind=("dict", "function"))
    if callable(imported):
        parameters = inspect.signature(imported).parameters.values()
        variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        required = [each for each in parameters if each.default is each.empty and each.kind not in variadic]
        if len(required) > 1 or any(each.kind is each.KEYWORD_ONLY for each in required):
            raise ConfigError(
                f"tp_plan={path!r} is a function that needs {', '.join(each.name for each in required)}, but it is "
                f"called with the model, or with nothing. Give its other arguments defaults."
            )
        takes_model = any(each.kind not in (each.KEYWORD_ONLY, each.VAR_KEYWORD) for each in parameters)
        imported = imported(model) if takes_model else imported()
    if not isinstance(imported, Mapping):
        raise ConfigError(f"tp_plan={path!r} is a {type(imported).__name__}, not a dict or a function returning one.")
    return imported


def _expand_plan(
    model: nn.Module, layout: ModelLayout, values: Mapping[str, StyleSpec], source: str, *, is_strict: bool
) -> TensorParallelPlan:
    """Match a plan's names with the model's modules and parameters, and translate torch styles."""
    for name, style in values.items():
        if isinstance(style, str) and style not in STYLES:
            raise ConfigError(
                f"{source} gives {name!r} the unknown style {style!r}.{suggest_match(style, STYLES)} "
                f"Known: {', '.join(STYLES)}."
            )
        if not isinstance(style, str | ParallelStyle):
            raise ConfigError(
                f"{source} gives {name!r} a {type(style).__name__}, not a style's name or a ParallelStyle of torch."
            )
    uses_sp, matched = uses_sequence_parallel(values.values()), set()
    plan = TensorParallelPlan(source, uses_sequence_parallel=uses_sp, is_user_provided=is_strict)
    for name, module in model.named_modules():
        key = next((each for each in iter_aliases(name) if each in values), None)
        if key is not None and name:
            matched.add(key)
            style = resolve_style(
                values[key], name, get_base_layer(model, name), is_head=name == layout.head, source=source
            )
            # A placeholder of a layer on another pipeline stage has nothing to shard.
            if style is not None and (not STYLES[style].required_attributes or any(True for _ in module.parameters())):
                plan.set_style(name, style, model)
        for parameter, _ in module.named_parameters(recurse=False):
            full = f"{name}.{parameter}" if name else parameter
            own = next((each for each in iter_aliases(full) if each in values), None)
            if own is not None:
                matched.add(own)
                style = resolve_style(values[own], full, module, is_head=full == layout.head, source=source)
                if style is not None:
                    plan.parameter_styles[full] = style
        # Names of modules on other pipeline stages.
        elsewhere = (f"{name}.{each}" for each in getattr(module, "absent_names", ()))
        matched.update(each for full in elsewhere for each in iter_aliases(full))
    unmatched = [name for name in values if name not in matched]
    if is_strict and unmatched:
        names = {replace_indices(name) for name, _ in model.named_modules()}
        raise ConfigError(
            f"{source} names {unmatched[0]!r}, which is no module or parameter of {type(model).__name__}."
            f"{suggest_match(unmatched[0], names)} `*` stands for the number of a layer."
        )
    for name in plan.module_styles:
        style = plan.get_style(name)
        module = get_base_layer(model, name)
        if (
            style is not None
            and style.required_attributes
            and not any(hasattr(module, each) for each in style.required_attributes)
        ):
            raise ModelError(
                f"{source} gives {name} ({type(module).__name__}) the style {plan.module_styles[name]!r}, which needs "
                f"a module with {' or '.join(style.required_attributes)}. Change the plan."
            )
    if is_strict:
        check_layers_have_styles(plan, model)
    gather_column_outputs(plan, model, layout)
    return plan


def _iter_linear_layers(model: nn.Module, layout: ModelLayout) -> Iterator[str]:
    """Yield the linear layers of blocks that are called as layers; their outputs are gathered."""
    wrapped = find_wrapped_modules(model)
    for block in layout.blocks:
        for name, _ in model.get_submodule(block).named_modules(prefix=block):
            # Subclasses may compute something else, so the exact type is required.
            is_linear = name not in wrapped and type(get_base_layer(model, name)) in (nn.Linear, Conv1D)
            if is_linear and not is_weight_read(model, name):
                yield name


def _apply_corrections(plan: TensorParallelPlan, model: nn.Module) -> None:
    corrections = _load_corrections().get(getattr(get_text_config(model), "model_type", ""), {})
    for names in (plan.module_styles, plan.parameter_styles):
        for name in names:
            for end, style in corrections.items():
                if f".{replace_indices(to_base_name(name))}".endswith(f".{end}"):
                    names[name] = style
    for name, style in list(plan.module_styles.items()):
        # A module's style also applies to its parameters.
        if style in corrections.values() and STYLES[style].required_attributes:
            plan.set_style(name, style, model)


@functools.cache
def _load_corrections() -> dict[str, dict[str, str]]:
    return dict(yaml.safe_load((Path(__file__).parent / "plan_corrections.yaml").read_text()))


def _add_vocabulary(plan: TensorParallelPlan, model: nn.Module, layout: ModelLayout) -> None:
    """Shard embedding and head along the vocabulary if the plan does not name them, tied or not."""
    # Without a separate head, a model may use the embedding's weight in unknown ways.
    if layout.embedding is None or layout.head is None or layout.head == layout.embedding:
        return
    embedding, head = get_base_layer(model, layout.embedding), get_base_layer(model, layout.head)
    if isinstance(embedding, nn.Embedding) and not plan.get_style_names(layout.embedding, model):
        plan.set_style(layout.embedding, "embedding_rowwise", model)
    if type(head) is nn.Linear and not plan.get_style_names(layout.head, model):
        plan.set_style(layout.head, "colwise_gather_output", model)


def _add_activations(plan: TensorParallelPlan, model: nn.Module) -> None:
    """All-reduce gradients of parameters that are used with sharded activations but are in no plan: those of activation
    functions between column- and row-parallel layers, and of modules after the lookup within an embedding."""
    wrapped = find_wrapped_modules(model)
    for name, style in list(plan.module_styles.items()):
        if style == "embedding_rowwise":
            for child, module in model.get_submodule(name).named_modules(prefix=name):
                if child != name and child not in wrapped and any(True for _ in module.parameters(recurse=False)):
                    plan.set_style(child, "replicated_with_grad_allreduce", model)
    parents = dict.fromkeys(name.rpartition(".")[0] for name, style in plan.module_styles.items() if style == "colwise")
    for parent in parents:
        for name, module in model.get_submodule(parent).named_children():
            own = list(module.parameters())
            path = f"{parent}.{name}"
            if path not in plan.module_styles and own and all(parameter.numel() == 1 for parameter in own):
                plan.set_style(path, "replicated_with_grad_allreduce", model)


def _add_tied(plan: TensorParallelPlan, model: nn.Module, layout: ModelLayout) -> None:
    """If one name of a tied parameter is sharded, shard the other names too; if that may be wrong, replicate all."""
    for names in layout.tied:
        owners = {name: model.get_submodule(name.rpartition(".")[0]) for name in names}
        if not any(name in plan.parameter_styles for name in names):
            continue
        for name, owner in owners.items():
            module = strip_base_layer(name.rpartition(".")[0])
            if name in plan.parameter_styles:
                continue
            if isinstance(owner, nn.Embedding):
                plan.set_style(module, "embedding_rowwise", model)
            elif type(owner) is nn.Linear:
                plan.set_style(module, "colwise_gather_output", model)
            elif model.get_parameter(name).dim() == 1:
                # A second name of a layer's bias.
                plan.parameter_styles[name] = next(
                    plan.parameter_styles[each] for each in names if each in plan.parameter_styles
                )
            else:
                for each in names:
                    plan.replicate(each.rpartition(".")[0], model)
                    plan.parameter_styles.pop(each, None)
                break


def get_text_config(model: nn.Module) -> Any:
    """Return the configuration of a transformers model, or of its text part."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def get_hf_tp_shard_plan(model: nn.Module) -> dict[str, ParallelStyle]:
    """Return the model's own plan as styles for `torch.distributed.tensor.parallel.parallelize_module`.

    Strategies use the same plan by default. A style without a torch equivalent, such as those of experts, becomes a
    `NamedStyle`, which `tp_plan` accepts and torch rejects.

    Args:
        model: a transformers model, or a model that contains such models, whose plans are merged.

    Returns:
        Style by the name of a module or parameter; `*` matches a number.

    Raises:
        MissingPlanError: the model has no plan.
    """
    if not merge_model_plans(model):
        raise MissingPlanError(
            f"{type(model).__name__} has no tensor-parallel plan of its own (tp_plan). Give one as a dict."
        )
    plan = find_plan(model, model_layout(model), registry=Registry([]))
    # Omit parameters whose style follows from their module's.
    implied = TensorParallelPlan(plan.source)
    for name, style in plan.module_styles.items():
        implied.set_style(name, style, model)
    explicit = {
        name: style for name, style in plan.parameter_styles.items() if implied.parameter_styles.get(name) != style
    }
    modules = _merge_wildcards(plan.module_styles, [name for name, _ in model.named_modules()])
    parameters = _merge_wildcards(explicit, [name for name, _ in model.named_parameters(remove_duplicate=False)])
    torch_styles: dict[str, ParallelStyle] = {}
    for name, style in (modules | parameters).items():
        try:
            torch_styles[name] = translate_to_torch_parallel_style(style)
        except ConfigError:
            torch_styles[name] = NamedStyle(style)
    return torch_styles


def _merge_wildcards(styles: dict[str, str], names: list[str]) -> dict[str, str]:
    """Merge entries whose names differ only in numbers, if all of them have the same style."""
    styles_by_pattern: dict[str, set[str | None]] = {}
    for name in names:
        styles_by_pattern.setdefault(replace_indices(name), set()).add(styles.get(name))
    return {
        replace_indices(name) if len(styles_by_pattern.get(replace_indices(name), ())) == 1 else name: style
        for name, style in styles.items()
    }

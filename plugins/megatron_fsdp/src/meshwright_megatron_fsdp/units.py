"""Prepare a model for wrapping: its units, the training dtypes, and placeholders for parameters on the meta device."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from meshwright.plugin import ModelError, ModelLayout, materialize, replace_parameters

from ._compat.package import import_package
from .config import MegatronFSDPConfig


def find_units(model: nn.Module, layout: ModelLayout, classes: Sequence[str] | None) -> list[nn.Module]:
    """Return the modules that are each gathered and reduced as one unit: those of the named classes, or the blocks.

    If the model's own class is named, the full model is one unit, and the result is empty.
    """
    if classes is None:
        return list(dict.fromkeys(model.get_submodule(name) for name in layout.blocks))
    units = []
    for name in classes:
        if name in _class_names(type(model)):
            return []
        modules = [module for module in model.modules() if name in _class_names(type(module))]
        if not modules:
            known = sorted({type(module).__name__ for module in model.modules()})
            raise ModelError(
                f"megatron_fsdp_unit_modules names {name!r}, but {type(model).__name__} has no module of that class. "
                f"Its classes: {', '.join(known)}."
            )
        units += modules
    return list(dict.fromkeys(units))


def _class_names(cls: type) -> tuple[str, str]:
    return cls.__name__, f"{cls.__module__}.{cls.__qualname__}"


def build_mixed_precision_policy(config: MegatronFSDPConfig, model: nn.Module) -> Any:
    """Return the package's policy of training, accumulation and communication dtypes; None means the parameters' own.

    At least one parameter of the model must require a gradient.
    """
    used = {parameter.dtype for parameter in model.parameters()}
    if {torch.float64, torch.float16} <= used:
        raise ModelError(
            "the model has parameters in float64 and in float16, which Megatron-FSDP cannot hold together. "
            "Convert one of them."
        )
    model_dtype = functools.reduce(torch.promote_types, (p.dtype for p in model.parameters() if p.requires_grad))
    at_least_fp32 = torch.promote_types(model_dtype, torch.float32)
    main_params = _find_dtype(config.main_params_dtype) or (at_least_fp32 if config.preserve_fp32_weights else None)
    main_grads = (
        _find_dtype(config.main_grads_dtype)
        or _find_dtype(config.reduce_dtype)
        or (at_least_fp32 if config.grad_reduce_in_fp32 else None)
    )
    for option, dtype in (("main_params_dtype", main_params), ("main_grads_dtype", main_grads)):
        if dtype is not None and torch.promote_types(dtype, model_dtype) != dtype:
            raise ModelError(
                f"{option}={str(dtype).removeprefix('torch.')} is coarser than the model's parameters ({model_dtype}). "
                f"Leave {option} out, or give a wider one."
            )
    if main_grads not in (None, model_dtype) and main_params is None:
        # A parameter only accepts gradients of its own dtype; gradients of the main copy are cast to its dtype.
        main_params = model_dtype
    return import_package().MixedPrecisionPolicy(main_params, main_grads, _find_dtype(config.grad_comm_dtype))


def _find_dtype(name: str | None) -> torch.dtype | None:
    return getattr(torch, name) if name else None


def replace_meta_parameters(model: nn.Module, device: torch.device, *, without_memory: bool) -> None:
    """Replace parameters on the meta device by placeholders, in place; tied parameters stay tied.

    The package copies each parameter into its buffers when it wraps a model, and drops it. So until the shards get
    their values, a placeholder of the same shape is enough; with `without_memory`, an expanded view of one element.
    """

    def make_placeholder(parameter: nn.Parameter) -> nn.Parameter:
        if not parameter.is_meta:
            return parameter
        if without_memory:
            value = torch.zeros((), dtype=parameter.dtype, device=device).expand(parameter.shape)
        else:
            value = torch.empty_like(parameter, device=device)
        placeholder = nn.Parameter(value, requires_grad=parameter.requires_grad)
        placeholder.__dict__.update(parameter.__dict__)
        return placeholder

    replace_parameters(model, make_placeholder)
    materialize(model, device)

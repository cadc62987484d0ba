"""Which dtypes the options ask for, given those of a model. Nothing is cast here."""

from __future__ import annotations

import functools

import torch
from torch import nn

from meshwright.base.errors import ModelError

from ._compat.wrapping import Dtypes
from .config import MegatronFSDPConfig


def find_dtypes(config: MegatronFSDPConfig, model: nn.Module) -> Dtypes:
    """What to accumulate, send and train in.

    Args:
        config: by name, or by the older switches for float32.
        model: whose parameters' dtypes are looked at; at least one trains.

    Raises:
        ModelError: a dtype is coarser than the parameters, or the parameters' own do not go together.
    """
    used = {parameter.dtype for parameter in model.parameters()}
    if {torch.float64, torch.float16} <= used:
        raise ModelError(
            "the model has parameters in float64 and in float16, which Megatron-FSDP cannot hold together. "
            "Convert one of them."
        )
    of_model = functools.reduce(torch.promote_types, (p.dtype for p in model.parameters() if p.requires_grad))
    at_least_fp32 = torch.promote_types(of_model, torch.float32)
    main_params = _named(config.main_params_dtype) or (at_least_fp32 if config.preserve_fp32_weights else None)
    main_grads = (
        _named(config.main_grads_dtype)
        or _named(config.reduce_dtype)
        or (at_least_fp32 if config.grad_reduce_in_fp32 else None)
    )
    for option, dtype in (("main_params_dtype", main_params), ("main_grads_dtype", main_grads)):
        if dtype is not None and torch.promote_types(dtype, of_model) != dtype:
            raise ModelError(
                f"{option}={str(dtype).removeprefix('torch.')} is coarser than the model's parameters ({of_model}). "
                f"Leave {option} out, or give a wider one."
            )
    if main_grads not in (None, of_model) and main_params is None:
        # A parameter takes gradients of its own dtype only; the main copy's are cast to it.
        main_params = of_model
    return Dtypes(main_params, main_grads, _named(config.grad_comm_dtype))


def _named(name: str | None) -> torch.dtype | None:
    return getattr(torch, name) if name else None

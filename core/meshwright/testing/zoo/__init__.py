"""A tiny random instance of every causal LM that transformers maps.

Configurations come from rules (`shrink`); zoo.yaml has, with reasons, what rules cannot know. A float64 model computes
in float64 throughout, whatever its architecture casts to float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import resources
from types import MethodType
from typing import Any

import torch
import yaml
from torch import nn
from torch.overrides import TorchFunctionMode

from ...base.errors import ModelError, nearest
from .shrink import tiny_config

NOISE = 0.02
"""Standard deviation of the noise added to each parameter: zeros and equal rows would hide errors."""


def zoo_types() -> list[str]:
    """Return every model type in transformers' causal-LM mapping."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def zoo_reason(model_type: str) -> str | None:
    """Return why the type cannot train as a text-only causal LM; None if it can."""
    return zoo_data()["refused"].get(model_type)


def zoo_config(model_type: str, *, tied: bool | None = None) -> Any:
    """Return the tiny configuration of a type, tied or not; None: as the type's own default.

    Raises:
        ModelError: no such type, or one that cannot train as a text-only causal LM.
    """
    from transformers import CONFIG_MAPPING

    if model_type not in zoo_types():
        raise ModelError(f"the zoo has no model type {model_type!r}.{nearest(model_type, zoo_types())}")
    reason = zoo_reason(model_type)
    if reason is not None:
        raise ModelError(f"the model type {model_type!r} cannot train as a text-only causal LM: {reason}")
    given = {name: value for name, value in zoo_data()["values"].get(model_type, {}).items() if name != "reason"}
    if tied is not None:
        given["tie_word_embeddings"] = tied
    return tiny_config(CONFIG_MAPPING[model_type], given)


def zoo_vocab(model_type: str) -> int:
    """Return the number of token ids that the type embeds."""
    return int(zoo_config(model_type).get_text_config().vocab_size)


def zoo_model(
    model_type: str, *, seed: int = 0, dtype: torch.dtype = torch.float64, tied: bool | None = None
) -> nn.Module:
    """Return a random instance in train mode, the same for equal arguments; the global random state does not change.

    Raises:
        ModelError: as `zoo_config`.
    """
    from transformers import AutoModelForCausalLM

    config = zoo_config(model_type, tied=tied)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        # The fused experts have no kernel for float64 on the CPU.
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, experts_implementation="eager")
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.is_floating_point():
                    parameter.add_(torch.randn_like(parameter), alpha=NOISE)
    if dtype is torch.float64:
        compute_in_float64(model)
    return model.train()


@functools.cache
def zoo_data() -> dict[str, dict[str, Any]]:
    """Return the content of zoo.yaml: `values` of fields by type, and types that are `refused`."""
    text = resources.files(__package__).joinpath("zoo.yaml").read_text(encoding="utf-8")
    data: dict[str, dict[str, Any]] = yaml.safe_load(text)
    return data


def compute_in_float64(model: nn.Module) -> None:
    """Make all parameters float64, and all forwards compute in float64.

    Many architectures cast norms, routers or states to float32 inside, whatever the model's dtype. A gradient summed
    there over tokens depends on how they are split into microbatches, by 1e-9: as much as some real bugs.

    Every module's own forward is wrapped, not only the model's, because activation checkpointing calls those of blocks
    again in the backward, past their hooks.
    """
    computation = _Computation()
    for module in model.modules():
        # A method, so that a copy of the module gets one of its own.
        module.forward = MethodType(computation.wrapped(type(module).forward), module)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(torch.float64)


class _Float64(TorchFunctionMode):
    """Every call of torch that names float32 names float64 instead."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        return func(*map(_widen, args), **{name: _widen(value) for name, value in (kwargs or {}).items()})


def _widen(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


class _Computation:
    """Hold the mode from the start of the outermost forward to its end."""

    def __init__(self) -> None:
        self._is_running = False
        self._mode = _Float64()

    def wrapped(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def wide(*args: Any, **kwargs: Any) -> Any:
            if self._is_running:
                return forward(*args, **kwargs)
            default_dtype = torch.get_default_dtype()
            torch.set_default_dtype(torch.float64)
            self._is_running = True
            try:
                with self._mode:
                    return forward(*args, **kwargs)
            finally:
                self._is_running = False
                torch.set_default_dtype(default_dtype)

        return wide

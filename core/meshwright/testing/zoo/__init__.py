"""A tiny random instance of every causal LM that transformers maps.

Configurations come from rules (`shrink`); what rules cannot know stands in zoo.yaml, with reasons. A float64 model
computes wholly in float64 (`wide`), whatever its architecture casts to float32.
"""

from __future__ import annotations

import functools
from importlib import resources
from typing import Any

import torch
import yaml
from torch import nn

from ...base.errors import ModelError, nearest
from .shrink import tiny_config
from .wide import compute_in_float64

NOISE = 0.02
"""Standard deviation of what is added to each parameter: zeros and equal rows would hide errors."""


def zoo_types() -> list[str]:
    """Every model type in transformers' causal-LM mapping."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def zoo_reason(model_type: str) -> str | None:
    """Why the type cannot train as a text-only causal LM; None if it can."""
    return zoo_data()["refused"].get(model_type)


def zoo_config(model_type: str, *, tied: bool | None = None) -> Any:
    """The tiny configuration.

    Args:
        model_type: one of `zoo_types()` without a `zoo_reason`.
        tied: embedding and head are one parameter; None leaves the type's own default.

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
    """Number of token ids that the type embeds: draw from [0, n)."""
    return int(zoo_config(model_type).get_text_config().vocab_size)


def zoo_model(
    model_type: str, *, seed: int = 0, dtype: torch.dtype = torch.float64, tied: bool | None = None
) -> nn.Module:
    """A random instance in train mode, the same for equal arguments; the global random state stays as it was.

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
    """What zoo.yaml says: `values` of fields by type, and types that are `refused`."""
    text = resources.files(__package__).joinpath("zoo.yaml").read_text(encoding="utf-8")
    data: dict[str, dict[str, Any]] = yaml.safe_load(text)
    return data

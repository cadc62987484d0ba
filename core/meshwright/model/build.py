"""Build or load the model of a run file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..base.errors import ModelError
from ..files.parsing import reason
from .base_files import note_files
from .configuration import DTYPE_NAMES, PARALLEL, check_init, checked_dtype_name
from .drawn_weights import DeferredModel
from .pretrained import open_pretrained
from .weights import Weights

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_NAMES}


def build_model(
    section: Mapping[str, Any],
    config: Any,
    *,
    seed: int,
    directory: Path | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[nn.Module, Weights | None]:
    """Make the run's model, the same on every rank.

    Args:
        section: the run file's `model`.
        config: of Hugging Face.
        seed: of new weights.
        directory: of Hugging Face, of the section's `path` or in its `checkpoint`; None: the path itself.
        dtype: of the parameters; None: the section's.

    Returns:
        The model with its parameters on the meta device, and their values: those at the section's `path`, a
        `PretrainedWeights`, or without one new ones from `seed`, as the section's `init` says; see `new_model_on_meta`.
        The weights of a `checkpoint` are loaded later.

    Raises:
        ModelError: transformers cannot build or load it.
    """
    if "path" not in section:
        model, values = new_model_on_meta(config, dtype_of(section), seed, init=section.get("init", PARALLEL))
        if directory is not None:
            note_files(model, directory)
        return model, values
    path = directory or Path(section["path"]).expanduser()
    allow_pickle = bool(section.get("allow_pickle", False))
    wanted = dtype or dtype_of(section)
    model, weights = open_pretrained(path, config, dtype=wanted, allow_pickle=allow_pickle, seed=seed)
    if weights.missing:
        raise ModelError(
            f"model.path={section['path']!r} lacks {len(weights.missing)} weights of the model, which would start at "
            f"random: {', '.join(weights.missing[:3])}{', ...' if len(weights.missing) > 3 else ''}. "
            f"Remove the fields that make the model larger than the saved one, or use a complete directory."
        )
    return model, weights


def new_model(config: Any, dtype: torch.dtype, seed: int) -> nn.Module:
    """The causal LM of a Hugging Face configuration, with the weights that transformers draws for `seed`.

    Raises:
        ModelError: transformers cannot build it.
    """
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    try:
        return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    except Exception as error:
        # Each model class checks its configuration in its own way, with errors of all kinds.
        raise ModelError(
            f"transformers cannot build the model {getattr(config, 'model_type', config)!r}: {reason(error)}"
        ) from error


def new_model_on_meta(
    config: Any, dtype: torch.dtype, seed: int, *, init: str = PARALLEL
) -> tuple[nn.Module, Weights | None]:
    """The causal LM of a Hugging Face configuration with its parameters on the meta device, and their initial values.

    Args:
        init: one of `INITS`. parallel: each rank draws what it holds, and every layout the same. as_transformers: the
            values of `new_model`, bit for bit; each rank draws all of them.

    Returns:
        Model and values; a few classes read values while they are built, of these the model with its values, and None.

    Raises:
        ModelError: transformers cannot build it, or there is no such `init`.
    """
    check_init(init, "init")
    with torch.device("meta"):
        model = new_model(config, dtype, seed)
    torch.manual_seed(seed)
    try:
        return model, DeferredModel(model, seed=seed if init == PARALLEL else None)
    except ModelError:
        return new_model(config, dtype, seed), None


def dtype_of(section: Mapping[str, Any]) -> torch.dtype:
    """Dtype of the parameters; float32 unless the section says otherwise."""
    return DTYPES[checked_dtype_name(section.get("dtype", "float32"), "model.dtype")]


def as_dtype(value: torch.dtype | str | None) -> torch.dtype | None:
    """A dtype of parameters, by itself or by its name; None stays None.

    Raises:
        ModelError: none in which models are trained.
    """
    return None if value is None else DTYPES[checked_dtype_name(str(value).removeprefix("torch."), "dtype")]

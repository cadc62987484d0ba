"""The job that a run file asks for, without its data, weights or network."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import nn

from meshwright.plugin import adapted_on_meta, check_names, model_config, new_model, optimizer_factory, try_optimization
from meshwright_run.layout import layout_of
from meshwright_run.preflight import RunModel, data_and_model_config, find_model
from meshwright_run.run_file import RunConfig

from .trace import Job


def job_of(config: RunConfig, world_size: int) -> Job:
    """Return what a run would do on so many ranks.

    Raises:
        MeshwrightError: what `train` would find wrong with it.
    """
    stack, degrees, rows = layout_of(config, world_size)
    steps = config.steps or 1
    try_optimization(config.optimizer, config.schedule.over(steps), steps, device=torch.device("cpu"))
    found = find_model(config.model)
    if found.directory is None and "vocab_size" not in config.model:
        # The tokenizer has the number.
        hf_config = data_and_model_config(config, found)[1]
    else:
        hf_config = model_config(config.model, tokenizer=None, seq_len=config.data.seq_len, directory=found.directory)
    make = functools.partial(_model, found, hf_config, found.dtype(config.model))
    return Job(
        stack,
        degrees,
        functools.partial(make, None),
        optimizer_factory(config.optimizer),
        microbatches=config.batch_size // (degrees.dp * rows),
        rows=rows,
        length=config.data.seq_len,
        max_grad_norm=config.max_grad_norm,
        grad_norm_type=config.grad_norm_type,
        layers=getattr(hf_config.get_text_config(), "num_hidden_layers", 0),
        with_layers=make,
        ema=config.ema,
        is_compiled=bool(getattr(stack.inner.config, "enable_compile", False)),
        chunked=("tp",) if getattr(stack.inner.config, "enable_async_tensor_parallel", False) else (),
    )


def _model(found: RunModel, hf_config: Any, dtype: torch.dtype, layers: int | None) -> nn.Module:
    hf_config = copy.deepcopy(hf_config)
    if layers is not None:
        text = hf_config.get_text_config()
        text.num_hidden_layers = layers
        if getattr(text, "layer_types", None) is not None:
            text.layer_types = text.layer_types[:layers]
    with torch.device("meta"):
        model = new_model(hf_config, dtype, 0)
    if found.adapters is None:
        return model
    check_names(found.adapters.config, model, where="model.peft")
    adapted: nn.Module = adapted_on_meta(model, {"default": copy.deepcopy(found.adapters.config)})
    return adapted

"""Models with adapters of peft, for cases that train one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

ALL_LAYERS: Mapping[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
"""Low-rank matrices in every linear layer of blocks."""


def adapted_model(model: nn.Module, options: Mapping[str, Any], *, seed: int) -> nn.Module:
    """A model with an adapter that already changes what it computes.

    Args:
        model: the base.
        options: fields of peft's `LoraConfig`; `frozen`: shell patterns of what does not train; `adapters`: names,
            of which the first trains, where there are several.
        seed: of the adapter's values, all of which are drawn, those that peft starts from zero too.
    """
    from peft import LoraConfig, get_peft_model

    fields = dict(options)
    names = fields.pop("adapters", ("default",))
    torch.manual_seed(seed)
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **fields), adapter_name=names[0])
    for name in names[1:]:
        adapted.add_adapter(name, LoraConfig(task_type="CAUSAL_LM", **fields))
    if len(names) > 1:
        adapted.base_model.set_adapter(list(names))
        for name, parameter in adapted.named_parameters():
            if any(f".{each}." in f"{name}." for each in names[1:]):
                parameter.requires_grad_(False)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name and "magnitude" not in name:
            nn.init.normal_(parameter, std=0.1)
    return adapted

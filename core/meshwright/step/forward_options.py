"""Arguments of a model's forward besides the batch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn


def forward_options(model: nn.Module, *, in_parts: bool = False) -> dict[str, Any]:
    """Return the options with which a model's forward is always called: no key-value cache, as far as it takes them.

    Args:
        in_parts: a rank runs a part of the layers or positions; see [Note: noted logits] in `router_loss`.
    """
    options = {"use_cache": False} | ({"output_router_logits": False} if in_parts else {})
    taken = inspect.signature(model.forward).parameters
    names = set(taken)
    if any(each.kind is each.VAR_KEYWORD for each in taken.values()):
        # Some classes do not name it, and hand it on to the model inside; peft's wrapper hands on all.
        base = _below_adapters(model)
        names |= set(inspect.signature(base.forward).parameters)
        names |= {"use_cache"} & set(inspect.signature(getattr(base, "base_model", base).forward).parameters)
    return {name: value for name, value in options.items() if name in names}


def forward_takes(model: nn.Module) -> frozenset[str]:
    """Return the names of a forward's arguments; other entries of a batch belong to the objective."""
    signatures = (inspect.signature(each.forward) for each in (model, _below_adapters(model)))
    return frozenset(name for each in signatures for name in each.parameters)


def _below_adapters(model: nn.Module) -> nn.Module:
    found: nn.Module = model.get_base_model() if hasattr(model, "get_base_model") else model
    return found


def with_router_logits(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return `forward_options` for a run that returns the logits of all routers."""
    return {name: value or name == "output_router_logits" for name, value in options.items()}

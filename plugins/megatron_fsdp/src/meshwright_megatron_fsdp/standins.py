"""Sharding a model that is on the meta device.

The package copies each parameter into its buffers when it wraps a model, and what the parameter held is lost on all
ranks but those that keep the shard. So for a model without values something takes the parameters' places that has their
shapes and needs no memory, until the shards get the values (see `meshwright.model.weights`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from meshwright.model.weights import materialize


def stand_in(model: nn.Module, device: torch.device, *, without_memory: bool) -> None:
    """Replace what is on the meta device, in place; tied parameters stay tied.

    Args:
        model: what of it is not on the meta device is left alone.
        device: where parameters and buffers come to lie.
        without_memory: parameters are views of one element each, to be copied and never written to.
    """
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if not parameter.is_meta:
                continue
            if id(parameter) not in made:
                value = _one(parameter, device) if without_memory else torch.empty_like(parameter, device=device)
                made[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
                made[id(parameter)].__dict__.update(parameter.__dict__)
            setattr(module, name, made[id(parameter)])
    materialize(model, device)


def _one(parameter: Tensor, device: torch.device) -> Tensor:
    return torch.zeros((), dtype=parameter.dtype, device=device).expand(parameter.shape)

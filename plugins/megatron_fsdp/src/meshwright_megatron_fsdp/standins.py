"""Sharding a model that is on the meta device.

The package copies each parameter into its buffers when it wraps a model, and what the parameter held is lost on all
ranks but those that keep the shard. So for a model without values something takes the parameters' places that has their
shapes and needs no memory, until the shards get the values (see `meshwright.model.weights`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from meshwright.model.weights import materialize, replace_parameters


def stand_in(model: nn.Module, device: torch.device, *, without_memory: bool) -> None:
    """Replace what is on the meta device, in place; tied parameters stay tied.

    Args:
        model: what of it is not on the meta device is left alone.
        device: where parameters and buffers come to lie.
        without_memory: parameters are views of one element each, to be copied and never written to.
    """

    def made(parameter: nn.Parameter) -> nn.Parameter:
        if not parameter.is_meta:
            return parameter
        value = _one(parameter, device) if without_memory else torch.empty_like(parameter, device=device)
        other = nn.Parameter(value, requires_grad=parameter.requires_grad)
        other.__dict__.update(parameter.__dict__)
        return other

    replace_parameters(model, made)
    materialize(model, device)


def _one(parameter: Tensor, device: torch.device) -> Tensor:
    return torch.zeros((), dtype=parameter.dtype, device=device).expand(parameter.shape)

"""One whole model for each stage of a rank, to be cut down; none takes memory that the model has not.

Where they are cut is said in `stage_model`. What several stages need is a parameter of each: see [Note: copies] in
`meshwright_pipeline.state.copies`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

from torch import nn


def separate_parts(model: nn.Module, count: int) -> list[nn.Module]:
    """The model and copies of its modules, `count` in all, which share all parameters."""
    shared = [{id(parameter): parameter for parameter in model.parameters()} for _ in range(count - 1)]
    return [model, *(copy.deepcopy(model, memo) for memo in shared)]


def own_parameters(parts: Sequence[nn.Module]) -> None:
    """Give each part parameters of its own where an earlier part has the same; in place, of equal values and dtypes."""
    taken: set[nn.Parameter] = set()
    for part in parts:
        made: dict[nn.Parameter, nn.Parameter] = {}
        for module in part.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if parameter in taken:
                    if parameter not in made:
                        made[parameter] = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
                    setattr(module, name, made[parameter])
        taken.update(part.parameters())

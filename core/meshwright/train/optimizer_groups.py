"""Which parameters are of which group of a run file's optimizer.

[Note: the whole model] A rank has a part of the model's parameters, and perhaps pieces of them. So what is trained of
the whole model is told to the factory before it is called: names, dims, and which of them are matrices. Each rank then
divides the same parameters into the same groups, and a group that none is of is an error on all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import nn

from ..base.errors import ConfigError, nearest
from ..model.layout import ModelLayout
from ..strategy.contract import OptimizerFactory
from .optimizer_config import OptimizerGroup


class Trained(NamedTuple):
    """What is known of a whole parameter.

    Attributes:
        dims: how many it has.
        is_matrix: whether it is the weight of a linear map between hidden states.
    """

    dims: int
    is_matrix: bool


def what_is_trained(
    model: nn.Module,
    layout: ModelLayout,
    named: Sequence[tuple[str, nn.Parameter]],
    shape: Callable[[nn.Parameter], torch.Size],
) -> dict[str, Trained]:
    """What is known of the parameters that are trained of a model, or of a stage of it.

    A matrix is a weight of two dims of a module in a block that is no embedding. What models keep in two dims beside
    (decays, stacked experts) is named otherwise than `weight`.

    Args:
        layout: of the model as it was before it was sharded.
        named: of what the optimizer trains.
        shape: of the whole of one of them.
    """
    embeddings = {
        f"{name}.{key}"
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding)
        for key, _ in module.named_parameters(recurse=False)
    }
    blocks = tuple(f"{block}." for block in layout.blocks)

    def is_matrix(name: str, dims: int) -> bool:
        return dims == 2 and name.startswith(blocks) and name.endswith(".weight") and name not in embeddings

    dims = {name: len(shape(parameter)) for name, parameter in named}
    return {name: Trained(count, is_matrix(name, count)) for name, count in dims.items()}


def check_model(groups: Sequence[OptimizerGroup], model: nn.Module, layout: ModelLayout) -> None:
    """Refuse groups of which a model has no parameter, before it is sharded.

    Raises:
        ConfigError: names the group.
    """
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    group_numbers(groups, what_is_trained(model, layout, named, lambda parameter: parameter.shape))


def for_model(factory: OptimizerFactory, trained: Mapping[str, Trained]) -> OptimizerFactory:
    """The factory for a model of which these are trained, in whole; see [Note: the whole model].

    Raises:
        ConfigError: the same on all ranks, of a factory of a run file whose groups are not those of the model.
    """
    told: Callable[[Mapping[str, Trained]], OptimizerFactory] | None = getattr(factory, "for_model", None)
    return factory if told is None else told(trained)


def group_numbers(groups: Sequence[OptimizerGroup], trained: Mapping[str, Trained]) -> dict[str, int]:
    """The number of the group of each parameter; `len(groups)` for the rest.

    Raises:
        ConfigError: a group has no parameter.
    """

    def fits(name: str, group: OptimizerGroup) -> bool:
        is_named = group.match is None or any(fnmatchcase(name, pattern) for pattern in group.match)
        return is_named and (trained[name].is_matrix or not group.matrices)

    numbers = {
        name: next((number for number, group in enumerate(groups) if fits(name, group)), len(groups))
        for name in trained
    }
    for number, group in enumerate(groups):
        if number not in numbers.values():
            taken = [name for name in trained if fits(name, group)]
            raise ConfigError(f"optimizer.groups[{number}] {_why_empty(group, taken, trained)}")
    return numbers


def _why_empty(group: OptimizerGroup, taken: Sequence[str], trained: Mapping[str, Trained]) -> str:
    if taken:
        return (
            f"has no parameter: all {len(taken)} that it fits, such as {taken[0]!r}, are of groups before it. Put it "
            f"before them, or remove it."
        )
    if group.match is None:
        return "is of matrices, and the model trains no weight of two dims within a block. Remove it."
    found = [name for name in trained if any(fnmatchcase(name, pattern) for pattern in group.match)]
    if found:
        return (
            f"fits no parameter: match={group.match} fits {len(found)}, such as {found[0]!r}, and none of them is a "
            f"weight of two dims within a block. Set matrices: false."
        )
    hints = "".join(dict.fromkeys(_nearest(pattern, trained) for pattern in group.match))
    some = ", ".join(list(trained)[:3])
    return (
        f"fits no parameter: match={group.match} fits none of the {len(trained)} names that are trained.{hints} They "
        f"are such as {some}. Change the patterns, or remove the group."
    )


def _nearest(pattern: str, names: Collection[str]) -> str:
    """What a pattern may have meant: the part of a name that is as long, in words."""
    words = pattern.strip("*.").split(".")
    windows = {
        ".".join(parts[start : start + len(words)])
        for parts in (name.split(".") for name in names)
        for start in range(len(parts) - len(words) + 1)
    }
    return nearest(".".join(words), sorted(windows))

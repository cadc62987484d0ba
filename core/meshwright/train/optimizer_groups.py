"""Which parameters are of which group of a run file's optimizer.

[Note: the whole model] A rank has a part of the model's parameters, and perhaps pieces of them. So what is trained of
the whole model is told to the factory before it is called: names, dims, and which of them are matrices. Each rank then
divides the same parameters into the same groups, and a group that none is of is an error on all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import nn

from ..base.errors import ConfigError, nearest
from ..model.layout import ModelLayout
from ..strategy.contract import OptimizerFactory
from .decay import is_decayed, matches
from .optimizer_config import OptimizerConfig, OptimizerGroup


class Trained(NamedTuple):
    """What is known of a whole parameter.

    Attributes:
        dims: how many it has.
        is_matrix: whether it is the weight of a linear map between hidden states.
        is_decayed: whether weight decay shrinks it; see `decay.is_decayed`.
    """

    dims: int
    is_matrix: bool
    is_decayed: bool


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
    owners = dict(model.named_modules(remove_duplicate=False))
    blocks = tuple(f"{block}." for block in layout.blocks)

    def known(name: str, whole: torch.Size) -> Trained:
        owner = owners.get(name.rpartition(".")[0])
        is_weight = name.startswith(blocks) and name.endswith(".weight") and not isinstance(owner, nn.Embedding)
        return Trained(len(whole), len(whole) == 2 and is_weight, is_decayed(name, whole, owner))

    return {name: known(name, shape(parameter)) for name, parameter in named}


def known_without_model(named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, Trained]:
    """What parameters and their names tell, where a factory is called by hand."""
    return {name: Trained(p.dim(), is_matrix=False, is_decayed=is_decayed(name, p.shape)) for name, p in named}


def check_model(config: OptimizerConfig, model: nn.Module, layout: ModelLayout) -> None:
    """Refuse groups of which a model has no parameter, and patterns that match none, before it is sharded.

    Raises:
        ConfigError: names the group, or the pattern.
    """
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    group_numbers(config, what_is_trained(model, layout, named, lambda parameter: parameter.shape))


def for_model(factory: OptimizerFactory, trained: Mapping[str, Trained]) -> OptimizerFactory:
    """The factory for a model of which these are trained, in whole; see [Note: the whole model].

    Raises:
        ConfigError: the same on all ranks, of a factory of a run file whose groups are not those of the model.
    """
    told: Callable[[Mapping[str, Trained]], OptimizerFactory] | None = getattr(factory, "for_model", None)
    return factory if told is None else told(trained)


def group_numbers(config: OptimizerConfig, trained: Mapping[str, Trained]) -> dict[str, int]:
    """The number of the group of each parameter; that of all groups for the rest.

    Raises:
        ConfigError: a group has no parameter, or a pattern of `no_decay` matches none.
    """
    groups = config.groups
    for pattern in config.no_decay or ():
        if not any(matches(name, pattern) for name in trained):
            raise ConfigError(_why_unmatched(pattern, trained))

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


def _why_unmatched(pattern: str, trained: Collection[str]) -> str:
    found = [name for name in trained if fnmatchcase(name.lower(), pattern.lower())]
    paths = f" It would match {len(found)} whole names, such as {found[0]!r}." if found else ""
    return (
        f"optimizer.no_decay: {pattern!r} matches no parameter that is trained. A pattern is of the last component of "
        f"a name, such as 'weight', or, with a dot in it, of the whole name.{paths} Norms, biases and vectors are "
        f"spared without it: leave no_decay out, or give other parameters a group with weight_decay: 0."
    )


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

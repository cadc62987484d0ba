"""Groups of parameters of an optimizer, which of them are decayed, and several optimizers as one.

[Note: the whole model] A rank has a part of the model's parameters, so the factory gets a description of all trained
parameters first: each rank forms the same groups, and an empty group is an error on all ranks.

[Note: what decides] Weight decay spares norms, biases, other vectors, and rates of a recurrence. The module that owns a
parameter, the unsharded shape, and the last component of the name decide: `blocks.0.norm_attn_norm.attn.Wqkv.weight` is
a matrix.
"""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..base.errors import ConfigError, StrategyError, suggest_match
from ..base.types import OptimizerFactory
from ..model.layout import ModelLayout

if TYPE_CHECKING:
    from .config import OptimizerConfig, OptimizerGroup


_NORM_CLASS = re.compile(r"norm(gated|\dd)?$", re.IGNORECASE)
_NORM_NAME = re.compile(r"(norms?|(^|_)ln)(_?[a-z]?\d*)?$", re.IGNORECASE)
_BIAS_NAME = re.compile(r"(^|_)bias(es)?(_|$)", re.IGNORECASE)
_WEIGHT_MODULES = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NO_DECAY_NAMES = re.compile(r"A_log|D|time_decay|time_first|(.*_)?(sinks?|scales?)|.*bias", re.DOTALL)
"""Last components of names that are spared whatever their shape: rates and skips of a recurrence, sinks of attention,
scales, and biases, of which experts have a matrix."""


def is_decayed(name: str, shape: Sequence[int], owner: nn.Module | None = None) -> bool:
    """Return whether weight decay shrinks a parameter; see [Note: what decides]."""
    path, _, last = name.rpartition(".")
    # A vector may be kept in the shape in which it is broadcast. A linear map may have one output.
    is_vector = len(shape) < 2 or (last != "weight" and sum(size > 1 for size in shape) < 2)
    if is_vector or _NO_DECAY_NAMES.fullmatch(last) or (owner is not None and _NORM_CLASS.search(type(owner).__name__)):
        return False
    # Numbers are of lists, and `_orig_mod` and `_checkpoint_wrapped_module` of wrappers.
    module = next((each for each in reversed(path.split(".")) if each[:1].isalpha()), "")
    return not _BIAS_NAME.search(module) and (isinstance(owner, _WEIGHT_MODULES) or not _NORM_NAME.search(module))


def matches_pattern(name: str, pattern: str) -> bool:
    """Return whether a pattern of `no_decay` selects a parameter, in any case of letters."""
    part = name if "." in pattern else name.rpartition(".")[2]
    return fnmatchcase(part.lower(), pattern.lower())


def split_by_decay(
    named_parameters: Iterable[tuple[str, nn.Parameter]], weight_decay: float, is_decayed: Callable[[str], bool]
) -> list[dict[str, Any]]:
    """Split parameters into decayed and others; without decay, one group without the key `weight_decay`."""
    named = list(named_parameters)
    if not weight_decay:
        return [{"params": [parameter for _, parameter in named]}]
    groups = [
        {"params": [parameter for name, parameter in named if is_decayed(name) is is_one], "weight_decay": decay}
        for is_one, decay in ((True, weight_decay), (False, 0.0))
    ]
    return [group for group in groups if group["params"]]


class ParamTraits(NamedTuple):
    """What the groups of an optimizer ask about a parameter."""

    num_dims: int
    is_matrix: bool
    is_decayed: bool


def describe_trained_params(
    model: nn.Module,
    layout: ModelLayout,
    named: Sequence[tuple[str, nn.Parameter]],
    shape: Callable[[nn.Parameter], torch.Size],
) -> dict[str, ParamTraits]:
    """Describe the trained parameters of a model, or of a stage of one, as they are before sharding."""
    owners = dict(model.named_modules(remove_duplicate=False))
    blocks = tuple(f"{block}." for block in layout.blocks)

    def known(name: str, whole: torch.Size) -> ParamTraits:
        owner = owners.get(name.rpartition(".")[0])
        is_weight = name.startswith(blocks) and name.endswith(".weight") and not isinstance(owner, nn.Embedding)
        return ParamTraits(len(whole), len(whole) == 2 and is_weight, is_decayed(name, whole, owner))

    return {name: known(name, shape(parameter)) for name, parameter in named}


def describe_params_by_name(named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, ParamTraits]:
    """Describe parameters on their own and their names, for a factory that is called by hand."""
    return {name: ParamTraits(p.dim(), is_matrix=False, is_decayed=is_decayed(name, p.shape)) for name, p in named}


def check_groups(config: OptimizerConfig, model: nn.Module, layout: ModelLayout) -> None:
    """Raise ConfigError if a group of the config fits no parameter of the model."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    assign_groups(config, describe_trained_params(model, layout, named, lambda parameter: parameter.shape))


def bind_to_model(factory: OptimizerFactory, trained: Mapping[str, ParamTraits]) -> OptimizerFactory:
    """Return the factory for a model of which these are trained; see [Note: the whole model]."""
    reported: Callable[[Mapping[str, ParamTraits]], OptimizerFactory] | None = getattr(factory, "bind_to_model", None)
    return factory if reported is None else reported(trained)


def assign_groups(config: OptimizerConfig, trained: Mapping[str, ParamTraits]) -> dict[str, int]:
    """Return the number of each parameter's group; the number of groups for the rest."""
    groups = config.groups
    for pattern in config.no_decay or ():
        if not any(matches_pattern(name, pattern) for name in trained):
            found = [name for name in trained if fnmatchcase(name.lower(), pattern.lower())]
            paths = f" It would match {len(found)} whole names, such as {found[0]!r}." if found else ""
            raise ConfigError(
                f"optimizer.no_decay: {pattern!r} matches no parameter that is trained. A pattern is of the last "
                f"component of a name, such as 'weight', or, with a dot in it, of the whole name.{paths} Norms, biases "
                f"and vectors are spared without it: leave no_decay out, or give other parameters a group with "
                f"weight_decay: 0."
            )

    def fits(name: str, group: OptimizerGroup) -> bool:
        is_named = group.match is None or any(fnmatchcase(name, pattern) for pattern in group.match)
        return is_named and (trained[name].is_matrix or not group.matrices_only)

    numbers = {
        name: next((number for number, group in enumerate(groups) if fits(name, group)), len(groups))
        for name in trained
    }
    for number, group in enumerate(groups):
        if number not in numbers.values():
            taken = [name for name in trained if fits(name, group)]
            raise ConfigError(f"optimizer.groups[{number}] {_why_empty(group, taken, trained)}")
    return numbers


def _why_empty(group: OptimizerGroup, taken: Sequence[str], trained: Mapping[str, ParamTraits]) -> str:
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
            f"weight of two dims within a block. Set matrices_only: false."
        )
    hints = "".join(dict.fromkeys(_suggest_pattern(pattern, trained) for pattern in group.match))
    some = ", ".join(list(trained)[:3])
    return (
        f"fits no parameter: match={group.match} fits none of the {len(trained)} names that are trained.{hints} They "
        f"are such as {some}. Change the patterns, or remove the group."
    )


def _suggest_pattern(pattern: str, names: Collection[str]) -> str:
    """Suggest what a pattern may have meant: the closest part of a name with as many words."""
    words = pattern.strip("*.").split(".")
    windows = {
        ".".join(parts[start : start + len(words)])
        for parts in (name.split(".") for name in names)
        for start in range(len(parts) - len(words) + 1)
    }
    return suggest_match(".".join(words), sorted(windows))


class ChainedOptimizer(Optimizer):
    """Steps each of its members, one after the other."""

    def __init__(self, members: Sequence[Optimizer]) -> None:
        if not members:
            raise StrategyError("Optimizers was given none. Give at least one optimizer.")
        self.optimizers = tuple(members)
        parameters = [id(each) for group in self.param_groups for each in group["params"]]
        if len(set(parameters)) < len(parameters):
            raise StrategyError(
                "two optimizers that are to step as one have the same parameter. Give each parameter to one of them."
            )
        # A group without parameters passes torch's checks and is given to no member.
        super().__init__([{"params": []}], dict(members[0].defaults))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all members; set values in them, not the list."""
        return [group for member in self.optimizers for group in member.param_groups]

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        if groups:
            raise StrategyError(
                "the parameter groups of several optimizers are their own and cannot be replaced as a list. Set values "
                "in the groups, or use load_state_dict."
            )

    @property
    def state(self) -> Mapping[Tensor, Any]:
        return _ChainedState(self.optimizers)

    @state.setter
    def state(self, state: Mapping[Tensor, Any]) -> None:
        if state:
            raise StrategyError("the state of several optimizers is their own. Use load_state_dict.")

    def step(self, closure: Any = None) -> None:
        for member in self.optimizers:
            member.step()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse a group with parameters, since it does not say whose it is, with a StrategyError."""
        if param_group["params"]:
            raise StrategyError(
                "a group to be added to several optimizers does not say to which. Use add_param_group of one of "
                "optimizer.members."
            )

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Give each member its own groups and state; the end of torch's load_state_dict."""
        groups, values = iter(state["param_groups"]), state["state"]
        for member in self.optimizers:
            mine = [next(groups) for _ in member.param_groups]
            own = {p: values[p] for group in mine for p in group["params"] if p in values}
            member.__setstate__({"state": defaultdict(dict, own), "param_groups": mine})


class _ChainedState(Mapping[Tensor, Any]):
    """The states of several optimizers; a look-up adds no entry."""

    def __init__(self, members: Sequence[Optimizer]) -> None:
        self._members = members

    def __getitem__(self, parameter: Tensor) -> Any:
        for member in self._members:
            if parameter in member.state:
                return member.state[parameter]
        raise KeyError(parameter)

    def __iter__(self) -> Iterator[Tensor]:
        return (parameter for member in self._members for parameter in member.state)

    def __len__(self) -> int:
        return sum(len(member.state) for member in self._members)


def get_members(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """Return the optimizers that an optimizer consists of."""
    return optimizer.optimizers if isinstance(optimizer, ChainedOptimizer) else (optimizer,)


def needs_closure(cls: type[Optimizer]) -> bool:
    closure = inspect.signature(cls.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def format_exception_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0].rstrip(".:")

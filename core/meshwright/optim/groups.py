"""Parameter groups of an optimizer, which parameters get weight decay, and several optimizers as one.

[Note: the full model] A rank has only some of the model's parameters. So the factory first gets a description of all
trainable parameters: every rank forms the same groups, and an empty group is an error on all ranks.

[Note: weight decay] Norms, biases, other vectors, and the rates of a recurrence are excluded from weight decay. This
depends on the module that owns a parameter, the unsharded shape, and the last component of the name. For example,
`blocks.0.norm_attn_norm.attn.Wqkv.weight` is a matrix and is decayed.
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
"""Last name components without weight decay, for any shape: rates and skips of a recurrence, attention sinks, scales,
and biases, which are matrices in experts."""


def is_decayed(name: str, shape: Sequence[int], owner: nn.Module | None = None) -> bool:
    """Return whether a parameter gets weight decay; see [Note: weight decay]."""
    path, _, last = name.rpartition(".")
    # A vector may be stored in the shape to which it is broadcast. But a linear layer's weight may have one output.
    is_vector = len(shape) < 2 or (last != "weight" and sum(size > 1 for size in shape) < 2)
    if is_vector or _NO_DECAY_NAMES.fullmatch(last) or (owner is not None and _NORM_CLASS.search(type(owner).__name__)):
        return False
    # Skip indices of lists, and the names `_orig_mod` and `_checkpoint_wrapped_module` of wrappers.
    module = next((each for each in reversed(path.split(".")) if each[:1].isalpha()), "")
    return not _BIAS_NAME.search(module) and (isinstance(owner, _WEIGHT_MODULES) or not _NORM_NAME.search(module))


def matches_pattern(name: str, pattern: str) -> bool:
    """Return whether a pattern of `no_decay` matches a parameter name; case-insensitive."""
    part = name if "." in pattern else name.rpartition(".")[2]
    return fnmatchcase(part.lower(), pattern.lower())


def split_by_decay(
    named_parameters: Iterable[tuple[str, nn.Parameter]], weight_decay: float, is_decayed: Callable[[str], bool]
) -> list[dict[str, Any]]:
    """Return parameter groups with and without weight decay; if it is 0, one group without the key `weight_decay`."""
    named = list(named_parameters)
    if not weight_decay:
        return [{"params": [parameter for _, parameter in named]}]
    groups = [
        {"params": [parameter for name, parameter in named if is_decayed(name) is is_one], "weight_decay": decay}
        for is_one, decay in ((True, weight_decay), (False, 0.0))
    ]
    return [group for group in groups if group["params"]]


class ParamTraits(NamedTuple):
    """Properties of a parameter that determine its optimizer group."""

    num_dims: int
    is_matrix: bool
    is_decayed: bool


def describe_trained_params(
    model: nn.Module,
    layout: ModelLayout,
    named: Sequence[tuple[str, nn.Parameter]],
    shape: Callable[[nn.Parameter], torch.Size],
) -> dict[str, ParamTraits]:
    """Describe the trainable parameters of a model, or of a pipeline stage, as they are before sharding.

    `shape` returns the full shape of a parameter.
    """
    owners = dict(model.named_modules(remove_duplicate=False))
    blocks = tuple(f"{block}." for block in layout.blocks)

    def describe(name: str, whole: torch.Size) -> ParamTraits:
        owner = owners.get(name.rpartition(".")[0])
        is_weight = name.startswith(blocks) and name.endswith(".weight") and not isinstance(owner, nn.Embedding)
        return ParamTraits(len(whole), len(whole) == 2 and is_weight, is_decayed(name, whole, owner))

    return {name: describe(name, shape(parameter)) for name, parameter in named}


def describe_params_by_name(named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, ParamTraits]:
    """Describe parameters only by their names and shapes, for a factory without a model."""
    return {name: ParamTraits(p.dim(), is_matrix=False, is_decayed=is_decayed(name, p.shape)) for name, p in named}


def check_groups(config: OptimizerConfig, model: nn.Module, layout: ModelLayout) -> None:
    """Raise ConfigError if a group of the config matches no trainable parameter of the model."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    assign_groups(config, describe_trained_params(model, layout, named, lambda parameter: parameter.shape))


def bind_to_model(factory: OptimizerFactory, trained: Mapping[str, ParamTraits]) -> OptimizerFactory:
    """Bind a factory to a model's trainable parameters; see [Note: the full model]."""
    bind: Callable[[Mapping[str, ParamTraits]], OptimizerFactory] | None = getattr(factory, "bind_to_model", None)
    return factory if bind is None else bind(trained)


def assign_groups(config: OptimizerConfig, trained: Mapping[str, ParamTraits]) -> dict[str, int]:
    """Return the index of each parameter's group; for parameters without a group, the number of groups.

    ConfigError if a group or a pattern of `no_decay` matches no parameter.
    """
    groups = config.groups
    for pattern in config.no_decay or ():
        if not any(matches_pattern(name, pattern) for name in trained):
            matches = [name for name in trained if fnmatchcase(name.lower(), pattern.lower())]
            paths = f" It would match {len(matches)} whole names, such as {matches[0]!r}." if matches else ""
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
            fitting = [name for name in trained if fits(name, group)]
            raise ConfigError(f"optimizer.groups[{number}] {_why_empty(group, fitting, trained)}")
    return numbers


def _why_empty(group: OptimizerGroup, taken: Sequence[str], trained: Mapping[str, ParamTraits]) -> str:
    if taken:
        return (
            f"has no parameter: all {len(taken)} that it fits, such as {taken[0]!r}, are of groups before it. Put it "
            f"before them, or remove it."
        )
    if group.match is None:
        return "is of matrices, and the model trains no weight of two dims within a block. Remove it."
    matches = [name for name in trained if any(fnmatchcase(name, pattern) for pattern in group.match)]
    if matches:
        return (
            f"fits no parameter: match={group.match} fits {len(matches)}, such as {matches[0]!r}, and none of them is "
            f"a weight of two dims within a block. Set matrices_only: false."
        )
    hints = "".join(dict.fromkeys(_suggest_pattern(pattern, trained) for pattern in group.match))
    some = ", ".join(list(trained)[:3])
    return (
        f"fits no parameter: match={group.match} fits none of the {len(trained)} names that are trained.{hints} They "
        f"are such as {some}. Change the patterns, or remove the group."
    )


def _suggest_pattern(pattern: str, names: Collection[str]) -> str:
    """Suggest the part of a name, with as many components, that is closest to a pattern."""
    words = pattern.strip("*.").split(".")
    windows = {
        ".".join(parts[start : start + len(words)])
        for parts in (name.split(".") for name in names)
        for start in range(len(parts) - len(words) + 1)
    }
    return suggest_match(".".join(words), sorted(windows))


class ChainedOptimizer(Optimizer):
    """Several optimizers that step as one."""

    def __init__(self, members: Sequence[Optimizer]) -> None:
        if not members:
            raise StrategyError("ChainedOptimizer got no optimizer. Give at least one optimizer.")
        self.optimizers = tuple(members)
        parameters = [id(each) for group in self.param_groups for each in group["params"]]
        if len(set(parameters)) < len(parameters):
            raise StrategyError(
                "two optimizers that are to step as one have the same parameter. Give each parameter to one of them."
            )
        # An empty group passes torch's checks and is not added to any member.
        super().__init__([{"params": []}], dict(members[0].defaults))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all members. Change values in the groups; the list itself is a copy."""
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
        """Raise StrategyError for a group with parameters, since it is unknown to which member it belongs."""
        if param_group["params"]:
            raise StrategyError(
                "a group to be added to several optimizers does not say to which. Use add_param_group of one of "
                "optimizer.members."
            )

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Give each member its groups and state; called last by torch's load_state_dict."""
        groups, values = iter(state["param_groups"]), state["state"]
        for member in self.optimizers:
            mine = [next(groups) for _ in member.param_groups]
            own = {p: values[p] for group in mine for p in group["params"] if p in values}
            member.__setstate__({"state": defaultdict(dict, own), "param_groups": mine})


class _ChainedState(Mapping[Tensor, Any]):
    """The states of several optimizers; unlike that of a single one, a look-up adds no entry."""

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

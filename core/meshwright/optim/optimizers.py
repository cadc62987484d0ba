"""Several optimizers as one for schedules, checkpoints and strategies.

Groups and state are looked up in the members at each access, since loading replaces them.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..base.errors import StrategyError


class Optimizers(Optimizer):
    """Steps each of its members, one after the other.

    Args:
        members: at least one; no two share a parameter, and together they have all that the factory was given.

    Raises:
        StrategyError: there is none, or two have the same parameter.
    """

    def __init__(self, members: Sequence[Optimizer]) -> None:
        if not members:
            raise StrategyError("Optimizers was given none. Give at least one optimizer.")
        self.members = tuple(members)
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
        return [group for member in self.members for group in member.param_groups]

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        if groups:
            raise StrategyError(
                "the parameter groups of several optimizers are their own and cannot be replaced as a list. Set values "
                "in the groups, or use load_state_dict."
            )

    @property
    def state(self) -> Mapping[Tensor, Any]:
        """The state of all members' parameters."""
        return _States(self.members)

    @state.setter
    def state(self, state: Mapping[Tensor, Any]) -> None:
        if state:
            raise StrategyError("the state of several optimizers is their own. Use load_state_dict.")

    def step(self, closure: Any = None) -> None:
        for member in self.members:
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
        for member in self.members:
            mine = [next(groups) for _ in member.param_groups]
            own = {p: values[p] for group in mine for p in group["params"] if p in values}
            member.__setstate__({"state": defaultdict(dict, own), "param_groups": mine})


class _States(Mapping[Tensor, Any]):
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


def members_of(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """Return the optimizers that step, each by itself."""
    return optimizer.members if isinstance(optimizer, Optimizers) else (optimizer,)


def needs_closure(cls: type[Optimizer]) -> bool:
    """Return whether a step needs a function that runs the model again."""
    closure = inspect.signature(cls.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def reason(error: Exception) -> str:
    """Return an error of an optimizer or schedule in one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0].rstrip(".:")

"""One optimizer in front of those of several stages on one rank. It computes nothing itself.

Its groups and state are looked up in theirs at each access: loading gives an optimizer new groups, and a list of the
old ones would take a schedule's rates to nobody.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshwright.base.errors import StrategyError
from meshwright.manager.data_parallel import DataParallelManager


class StageOptimizers(Optimizer):
    """Steps the optimizers of all stages; its parameter groups and state are theirs.

    Args:
        managers: of this rank's stages that train, at least one; each has its optimizer.
    """

    def __init__(self, managers: Sequence[DataParallelManager]) -> None:
        self._managers = tuple(managers)
        # A group without parameters passes torch's checks and is given to no stage.
        super().__init__([{"params": []}], dict(managers[0].optimizer.defaults))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all stages; set values in them, not the list."""
        return [group for manager in self._managers for group in manager.optimizer.param_groups]

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        if groups:
            raise StrategyError(
                "the parameter groups of a pipeline are those of its stages' optimizers and cannot be replaced as a "
                "list. Set values in the groups, or use add_param_group or load_state_dict."
            )

    @property
    def state(self) -> dict[Tensor, Any]:
        """The state of all stages' parameters; the mapping is a copy, its values are not."""
        return {p: values for manager in self._managers for p, values in manager.optimizer.state.items()}

    @state.setter
    def state(self, state: Mapping[Tensor, Any]) -> None:
        if state:
            raise StrategyError("the state of a pipeline's optimizer is that of its stages'. Use load_state_dict.")

    def step(self, closure: Any = None) -> None:
        """Step all stages, and drop the gradients."""
        for manager in self._managers:
            manager.optimizer_step()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Give each stage those parameters of a group that are its own.

        Raises:
            StrategyError: a parameter is of no stage on this rank.
        """
        given = param_group["params"]
        parameters = [given] if isinstance(given, Tensor) else list(given)
        parts = [_among(parameters, list(manager.trainable())) for manager in self._managers]
        if sum(map(len, parts)) < len(parameters):
            raise StrategyError(
                f"of {len(parameters)} parameters of a group to add, {sum(map(len, parts))} are of the stages on this "
                f"rank. Take them from manager.model_parts, after parallelize."
            )
        for manager, part in zip(self._managers, parts, strict=True):
            if part:
                manager.optimizer.add_param_group({**param_group, "params": part})

    def __setstate__(self, state: dict[str, Any]) -> None:
        """What torch's load_state_dict ends with: each stage takes its own groups and state."""
        groups, values = iter(state["param_groups"]), state["state"]
        for manager in self._managers:
            optimizer = manager.optimizer
            mine = [next(groups) for _ in optimizer.param_groups]
            own = {p: values[p] for group in mine for p in group["params"] if p in values}
            optimizer.__setstate__({"state": defaultdict(dict, own), "param_groups": mine})


class NoStages(Optimizer):
    """For a rank whose stages are frozen: it trains nothing, and has the rate of the ranks that do.

    Args:
        lr: learning rate of the first parameter group of the first rank that trains.
    """

    def __init__(self, lr: float | Tensor) -> None:
        super().__init__([nn.Parameter(torch.zeros(()))], {"lr": lr})

    def step(self, closure: Any = None) -> None:
        """Do nothing."""

    def follow(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Take the rates of loaded groups."""
        for group in groups[:1]:
            self.param_groups[0].update({key: value for key, value in group.items() if key in ("lr", "initial_lr")})


def _among(parameters: Sequence[Tensor], known: Sequence[Tensor]) -> list[Tensor]:
    found = {id(parameter) for parameter in known}
    return [parameter for parameter in parameters if id(parameter) in found]

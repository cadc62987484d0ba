"""Which stage holds which parameter, and how the state of stages becomes that of the whole model.

The name of a parameter that has several is, as in torch, the first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from meshwright.base.errors import ModelError, StrategyError

from ..cut.stage_model import Cut


class Names:
    """Names of a whole model before it is taken apart.

    Attributes:
        canonical: for each name of a parameter, the first of that parameter.
        shared: for each trainable parameter that several stages hold, these stages.
    """

    def __init__(
        self,
        canonical: Mapping[str, str],
        shared: Mapping[str, tuple[int, ...]],
        order: Sequence[str],
        stage_of: Callable[[str], int],
    ) -> None:
        self.canonical, self.shared = canonical, shared
        self._order = order
        self._first: dict[str, int] = {}
        for name in order:
            first = canonical.get(name, name)
            self._first[first] = min(stage_of(name), self._first.get(first, stage_of(name)))

    def first_stage(self, name: str) -> int:
        """The first stage that holds a parameter or persistent buffer."""
        return self._first[self.canonical.get(name, name)]

    @classmethod
    def of_model(cls, model: nn.Module, cut: Cut, split: Sequence[range]) -> Names:
        """Of a model that is to be taken apart."""
        canonical = first_names(model)
        holders: dict[str, set[int]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if parameter.requires_grad:
                holders.setdefault(canonical[name], set()).update(_holders(name, cut, split))
        shared = {name: tuple(sorted(stages)) for name, stages in holders.items() if len(stages) > 1}
        return cls(canonical, shared, list(model.state_dict()), lambda name: min(_holders(name, cut, split), default=0))

    @classmethod
    def of_stages(cls, stages: Sequence[tuple[Mapping[str, str], Sequence[str]]]) -> Names:
        """Of stages that are given as such.

        Args:
            stages: `first_names` and the names of the state of each.

        Raises:
            ModelError: two stages have parameters of one name.
        """
        canonical: dict[str, str] = {}
        for index, (names, _) in enumerate(stages):
            both = sorted(canonical.keys() & names.keys())
            if both:
                raise ModelError(
                    f"stage {index} of the pipeline and one before it both have a parameter {both[0]!r}. Give each "
                    f"stage the parameters of its own part of the model, under the names of the whole."
                )
            canonical.update(names)
        stage_of = {name: index for index, (_, order) in reversed(list(enumerate(stages))) for name in order}
        return cls(
            canonical, {}, list(dict.fromkeys(name for _, order in stages for name in order)), stage_of.__getitem__
        )

    def merged(self, states: Sequence[Mapping[str, Any]], *, with_optimizer: bool) -> dict[str, Any]:
        """The state of the whole model from those of all stages, in order; nothing from nothing."""
        model: dict[str, Any] = {}
        values: dict[str, Any] = {}
        groups: list[dict[str, Any]] = []
        masters: dict[str, Any] = {}
        for state in states:
            for name, tensor in state["model"].items():
                # Tied names keep sharing one tensor.
                model.setdefault(name, model.get(self.canonical.get(name, name), tensor))
            optimizer = state.get("optimizer", {})
            for name, each in optimizer.get("state", {}).items():
                values.setdefault(self.canonical[name], each)
            for name, each in optimizer.get("masters", {}).items():
                masters.setdefault(self.canonical[name], each)
            for group in optimizer.get("param_groups", []):
                self._add(group, groups)
        whole: dict[str, Any] = {"model": {name: model[name] for name in self._order if name in model}}
        if with_optimizer:
            whole["optimizer"] = {"state": values, "param_groups": groups} if states else {}
            if masters:
                whole["optimizer"]["masters"] = masters
        return whole

    def _add(self, group: Mapping[str, Any], groups: list[dict[str, Any]]) -> None:
        """Join a stage's parameter group with the one of equal settings."""
        names = [self.canonical[name] for name in group["params"]]
        settings = {key: value for key, value in group.items() if key != "params"}
        for each in groups:
            if {key: value for key, value in each.items() if key != "params"} == settings:
                each["params"] += [name for name in names if name not in each["params"]]
                return
        groups.append({**settings, "params": names})

    def check(self, model: Mapping[str, Any]) -> None:
        """Refuse a whole state with what the model does not have.

        Raises:
            StrategyError: names some of it.
        """
        unknown = sorted(set(model) - set(self._order))
        if unknown:
            raise StrategyError(
                f"the model state holds what the run does not have: {', '.join(unknown[:3])}"
                f"{f' and {len(unknown) - 3} more' if len(unknown) > 3 else ''}. Load state of the same architecture."
            )

    def part(self, whole: Mapping[str, Any], names: Sequence[str], trained: Sequence[str]) -> dict[str, Any]:
        """A stage's state from that of the whole model.

        Args:
            whole: state of the whole model.
            names: of the stage's parameters and buffers.
            trained: of its parameters, each once.
        """
        model = {name: value for name in names if (value := self._value(whole["model"], name)) is not None}
        optimizer = whole.get("optimizer", {})
        saved = optimizer.get("state", {})
        local = {self.canonical[name]: name for name in trained}
        groups = [
            {**group, "params": [local[name] for name in group["params"] if name in local]}
            for group in optimizer.get("param_groups", [])
        ]
        return {
            "model": model,
            "optimizer": {
                "state": {local[name]: values for name, values in saved.items() if name in local},
                "param_groups": groups,
                "masters": {
                    local[name]: value for name, value in optimizer.get("masters", {}).items() if name in local
                },
            },
        }

    def _value(self, model: Mapping[str, Any], name: str) -> Any:
        return model.get(name, model.get(self.canonical.get(name, name)))


def first_names(model: nn.Module) -> dict[str, str]:
    """For each name of a parameter, the first of that parameter."""
    first: dict[nn.Parameter, str] = {}
    return {
        name: first.setdefault(parameter, name) for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def _holders(name: str, cut: Cut, split: Sequence[range]) -> set[int]:
    """The stages that hold a parameter or buffer under this name."""
    if name in cut.loose:
        return {0}
    block = next((index for index, each in enumerate(cut.blocks) if name.startswith(f"{each}.")), None)
    if block is not None:
        return {stage for stage, blocks in enumerate(split) if block in blocks}
    module = name.rpartition(".")[0]
    if module not in cut.outside:
        # Buffers of a module without parameters, which takes no memory worth saving.
        return set(range(len(split)))
    return {stage for stage, blocks in enumerate(split) if cut.runs_in(module, blocks)}

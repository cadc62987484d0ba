"""Which stage holds which parameter, under the names of the whole model. Names alone, no values.

The name of a parameter that has several is, as in torch, the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from torch import nn

from meshwright.base.errors import ModelError
from meshwright.model.layout import ModelLayout

from ..cut.cut import Cut

T = TypeVar("T")


class Names:
    """Names of a whole model before it is taken apart.

    Attributes:
        canonical: for each name of a parameter, the first of that parameter.
        shared: for each trainable parameter that several stages hold, these stages, ascending.
        parts: for each trainable parameter, the part of the whole model that it is in; see `ModelLayout.part_of`.
        order: of all names of parameters and persistent buffers in the whole state.
    """

    def __init__(
        self,
        canonical: Mapping[str, str],
        shared: Mapping[str, tuple[int, ...]],
        parts: Mapping[str, str],
        order: Sequence[str],
        stage_of: Callable[[str], int],
    ) -> None:
        self.canonical, self.shared, self.parts, self.order = canonical, shared, parts, order
        self._first: dict[str, int] = {}
        for name in order:
            first = canonical.get(name, name)
            self._first[first] = min(stage_of(name), self._first.get(first, stage_of(name)))

    def first_stage(self, name: str) -> int:
        """The first stage that holds a parameter or persistent buffer."""
        return self._first[self.canonical.get(name, name)]

    def local(self, names: Iterable[str]) -> dict[str, str]:
        """The names of a stage's parameters, each once, by those of the whole model."""
        return {self.canonical[name]: name for name in names}

    @classmethod
    def of_model(cls, model: nn.Module, layout: ModelLayout, cut: Cut, split: Sequence[range]) -> Names:
        """Of a model that is to be taken apart."""
        canonical = first_names(model)
        holders: dict[str, set[int]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if parameter.requires_grad:
                holders.setdefault(canonical[name], set()).update(_holders(name, cut, split))
        shared = {name: tuple(sorted(stages)) for name, stages in holders.items() if len(stages) > 1}
        return cls(
            canonical,
            shared,
            trained_parts(model, layout),
            list(model.state_dict()),
            lambda name: min(_holders(name, cut, split), default=0),
        )

    @classmethod
    def of_stages(cls, stages: Sequence[tuple[Mapping[str, str], Mapping[str, str], Sequence[str]]]) -> Names:
        """Of stages that are given as such.

        Args:
            stages: `first_names`, `trained_parts` and the names of the state of each.

        Raises:
            ModelError: two stages have parameters of one name.
        """
        canonical: dict[str, str] = {}
        parts: dict[str, str] = {}
        for index, (names, trained, _) in enumerate(stages):
            both = sorted(canonical.keys() & names.keys())
            if both:
                raise ModelError(
                    f"stage {index} of the pipeline and one before it both have a parameter {both[0]!r}. Give each "
                    f"stage the parameters of its own part of the model, under the names of the whole."
                )
            canonical.update(names)
            parts.update(trained)
        stage_of = {name: index for index, (*_, order) in reversed(list(enumerate(stages))) for name in order}
        return cls(
            canonical,
            {},
            parts,
            list(dict.fromkeys(name for *_, order in stages for name in order)),
            stage_of.__getitem__,
        )


def first_names(model: nn.Module) -> dict[str, str]:
    """For each name of a parameter, the first of that parameter."""
    first: dict[nn.Parameter, str] = {}
    return {
        name: first.setdefault(parameter, name) for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def trained_parts(model: nn.Module, layout: ModelLayout) -> dict[str, str]:
    """For each parameter that trains, under the first of its names, the part of the model that it is in."""
    return {name: layout.part_of(name) for name, parameter in model.named_parameters() if parameter.requires_grad}


def renamed(values: Mapping[str, T], local: Mapping[str, str]) -> dict[str, T]:
    """Values by names of the whole model, under the names of a stage; without those that it does not have."""
    return {local[name]: each for name, each in values.items() if name in local}


def local_groups(groups: Sequence[Mapping[str, Any]], local: Mapping[str, str]) -> list[dict[str, Any]]:
    """Parameter groups with the parameters that a stage has, under its names; groups may be empty then."""
    return [{**group, "params": [local[name] for name in group["params"] if name in local]} for group in groups]


def _holders(name: str, cut: Cut, split: Sequence[range]) -> set[int]:
    """The stages that hold a parameter or buffer under this name."""
    if name in cut.loose:
        return {0}
    block = next((index for index, each in enumerate(cut.blocks) if name.startswith(f"{each}.")), None)
    if block is not None:
        return {stage for stage, blocks in enumerate(split) if block in blocks}
    module = name.rpartition(".")[0]
    while module and module not in cut.outside:
        # A module that reads what it holds in a container stands for all that is in it.
        module = module.rpartition(".")[0]
    if not module:
        # Buffers of a module without parameters, which takes no memory worth saving.
        return set(range(len(split)))
    return {stage for stage, blocks in enumerate(split) if cut.runs_in(module, blocks)}

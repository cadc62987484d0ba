"""Which modules are gathered together: a model's units, innermost first.

A block is a unit, and the root holds the rest. Experts that are divided over ranks are units of their own, on a mesh of
their own. Where blocks share parameters (one transformer block that serves several layers, say), the modules that share
them are a unit of their own, since a parameter has one owner. A block that shares parameters with what lies outside of
the blocks is left to the root.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import nn

from meshwright.layout import ModelLayout


@dataclass(frozen=True)
class Unit:
    """Names of the modules that are gathered together, and whether what follows in forward is their own backward."""

    names: tuple[str, ...]
    is_last: bool
    is_block: bool = False
    is_experts: bool = False

    @property
    def is_root(self) -> bool:
        return self.names == ("",)


def find_units(model: nn.Module, layout: ModelLayout, experts: Collection[str] = ()) -> list[Unit]:
    """The units of a model, each before those that contain it; the root comes last.

    Args:
        experts: names of modules that lie on the expert mesh.
    """
    across = [names for names in layout.tied if len({_block_of(name, layout) for name in names}) > 1]
    inside = [names for names in across if None not in {_block_of(name, layout) for name in names}]
    rooted = {_block_of(name, layout) for names in across if names not in inside for name in names}
    shared = shared_modules(model, layout, inside)
    taken = {name for names in shared for name in names} | rooted
    last = {stack[-1] for stack in layout.stacks}
    units = [Unit((name,), is_last=_block_of(name, layout) in last, is_experts=True) for name in experts]
    units += [Unit(names, is_last=False) for names in shared]
    for stack in layout.stacks:
        units += [Unit((name,), is_last=name == stack[-1], is_block=True) for name in stack if name not in taken]
    return [*units, Unit(("",), is_last=True)]


def separate_names(units: Sequence[Unit]) -> list[str]:
    """Names of the modules that are gathered by themselves within blocks, but for experts."""
    return [name for unit in units if not (unit.is_block or unit.is_root or unit.is_experts) for name in unit.names]


def shared_modules(model: nn.Module, layout: ModelLayout, tied: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The largest modules within blocks that consist of shared parameters, those that share with each other together.

    Args:
        model: before sharding.
        layout: of the model.
        tied: groups of parameter names, each in blocks and in more than one.
    """
    all_names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    shared_names = {name for names in tied for name in names}
    groups: list[set[str]] = []
    for names in tied:
        group = {_largest(name, _block_of(name, layout) or "", all_names, shared_names) for name in names}
        # Sets that meet become one.
        for other in [each for each in groups if each & group]:
            groups.remove(other)
            group |= other
        groups.append(group)
    order = {name: index for index, (name, _) in enumerate(model.named_modules(remove_duplicate=False))}
    return [tuple(sorted(group, key=order.__getitem__)) for group in groups]


def _largest(parameter: str, block: str, all_names: Sequence[str], shared: set[str]) -> str:
    """Climb from a parameter's module as long as all below is shared, up to the block."""
    module = parameter.rpartition(".")[0]
    while module != block:
        parent = module.rpartition(".")[0]
        if not all(name in shared for name in all_names if name.startswith(f"{parent}.")):
            break
        module = parent
    return module


def _block_of(name: str, layout: ModelLayout) -> str | None:
    return next((block for block in layout.blocks if name.startswith(f"{block}.")), None)

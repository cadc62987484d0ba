"""Which modules are gathered together: a model's units, innermost first.

A block is a unit, and the root holds the rest. Experts that are divided over ranks are units of their own, on a mesh of
their own. Where blocks share parameters (one transformer block that serves several layers, say), the modules that share
them are a unit of their own, since a parameter has one owner. A block that shares parameters with what lies outside of
the blocks is left to the root.

[Note: units by dtype] A unit's gradients are reduced as one buffer, so they have one dtype. Some models keep a few
parameters in float32 beside half precision (routers, decay rates): those of another dtype than most of their unit are a
unit of their own, at a module within it, gathered with that module's forward.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from meshwright.base.errors import ModelError
from meshwright.model.layout import ModelLayout


@dataclass(frozen=True)
class Unit:
    """Modules that are gathered together.

    Attributes:
        names: of the modules; the root's is empty.
        is_last: whether what follows in forward is their own backward.
        is_block: whether it is one block of a stack.
        is_experts: whether it lies on the expert mesh.
        dtype: of the parameters that the unit has; None: it has all that no other unit has.
    """

    names: tuple[str, ...]
    is_last: bool
    is_block: bool = False
    is_experts: bool = False
    dtype: torch.dtype | None = None

    @property
    def is_root(self) -> bool:
        """Whether it holds what is in no other unit."""
        return self.names == ("",)


def find_units(model: nn.Module, layout: ModelLayout, experts: Collection[str] = ()) -> list[Unit]:
    """The units of a model, each before those that contain it; the root comes last.

    Args:
        model: before sharding.
        layout: of the model.
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


def units_by_dtype(model: nn.Module, units: Sequence[Unit]) -> list[tuple[Unit, Unit]]:
    """See [Note: units by dtype]: what has to be split off, each with the unit around it.

    Args:
        model: before sharding.
        units: of `find_units`.

    Raises:
        ModelError: parameters of several dtypes lie in the very module of a unit, or in modules that share a unit.
    """
    names = {name for unit in units for name in unit.names}
    taken: set[nn.Parameter] = set()
    found: list[tuple[Unit, Unit]] = []
    for unit in units:
        owners: dict[torch.dtype, dict[str, int]] = {}
        for name in unit.names:
            prefix = f"{name}." if name else ""
            for leaf, parameter in model.get_submodule(name).named_parameters():
                if parameter not in taken:
                    taken.add(parameter)
                    if parameter.requires_grad:
                        owners.setdefault(parameter.dtype, {})[prefix + leaf] = parameter.numel()
        most = max(owners, key=lambda dtype: sum(owners[dtype].values()), default=None)
        for dtype, sizes in owners.items():
            if dtype != most:
                places = [_place_within(model, unit, leaf, names) for leaf in sizes]
                if None in places:
                    raise _mixed(unit, {each: next(iter(owned)) for each, owned in owners.items()})
                modules = tuple(dict.fromkeys(place for place in places if place is not None))
                found.append((replace(unit, names=modules, dtype=dtype, is_block=False), unit))
    return found


def _place_within(model: nn.Module, unit: Unit, parameter: str, taken: Collection[str]) -> str | None:
    """The outermost module around a parameter that is called, lies within its unit and is none itself."""
    if len(unit.names) > 1:
        return None
    prefix = f"{unit.names[0]}." if unit.names[0] else ""
    parts = parameter.removeprefix(prefix).split(".")[:-1]
    for count in range(1, len(parts) + 1):
        name = prefix + ".".join(parts[:count])
        if name not in taken and not isinstance(model.get_submodule(name), nn.ModuleList | nn.ModuleDict):
            return name
    return None


def _mixed(unit: Unit, examples: Mapping[torch.dtype, str]) -> ModelError:
    told = " and ".join(f"{name} ({dtype})" for dtype, name in examples.items())
    return ModelError(
        f"fsdp2 reduces the gradients of {unit.names[0] or 'the root'} together, but {told} differ in dtype, and no "
        f"module within it holds those of one. Convert the model to one dtype (model.to(torch.float32), with "
        f"mp_policy.param_dtype to compute in another), or freeze the parameters of one."
    )


def separate_names(model: nn.Module, layout: ModelLayout) -> list[str]:
    """Names of the modules that are gathered by themselves within blocks, but for experts.

    Args:
        model: before sharding.
        layout: of the model.

    Raises:
        ModelError: as `units_by_dtype`.
    """
    units = find_units(model, layout)
    shared = [unit for unit in units if not (unit.is_block or unit.is_root or unit.is_experts)]
    return [name for unit in (*shared, *(inner for inner, _ in units_by_dtype(model, units))) for name in unit.names]


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

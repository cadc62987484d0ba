"""Find a model's units: modules whose parameters are gathered together; innermost first.

Each block is a unit, and the root has the remaining parameters. Experts that are sharded over `ep` are units on their
own mesh. Modules that blocks share form a unit, since a parameter has one owner. A block that shares parameters with
modules outside of blocks belongs to the root.

[Note: units by dtype] A unit's gradients are reduced as one buffer with one dtype. Parameters with another dtype than
most of their unit, such as float32 routers or decay rates, form a separate unit at a module within it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from meshwright.plugin import ModelError, ModelLayout


@dataclass(frozen=True)
class FSDPUnit:
    """Modules whose parameters are gathered together."""

    names: tuple[str, ...]
    is_last: bool
    is_block: bool = False
    is_experts: bool = False
    dtype: torch.dtype | None = None

    @property
    def is_root(self) -> bool:
        return self.names == ("",)


def find_units(model: nn.Module, layout: ModelLayout, experts: Collection[str] = ()) -> list[FSDPUnit]:
    """Return the units of an unsharded model, each before those that contain it; the root comes last."""
    cross_block = [names for names in layout.tied if len({_find_block(name, layout) for name in names}) > 1]
    block_only = [names for names in cross_block if None not in {_find_block(name, layout) for name in names}]
    root_blocks = {_find_block(name, layout) for names in cross_block if names not in block_only for name in names}
    shared = _find_shared_modules(model, layout, block_only)
    excluded = {name for names in shared for name in names} | root_blocks
    last = {stack[-1] for stack in layout.stacks}
    units = [FSDPUnit((name,), is_last=_find_block(name, layout) in last, is_experts=True) for name in experts]
    units += [FSDPUnit(names, is_last=False) for names in shared]
    for stack in layout.stacks:
        units += [FSDPUnit((name,), is_last=name == stack[-1], is_block=True) for name in stack if name not in excluded]
    return [*units, FSDPUnit(("",), is_last=True)]


def split_units_by_dtype(model: nn.Module, units: Sequence[FSDPUnit]) -> list[tuple[FSDPUnit, FSDPUnit]]:
    """Return the units to split off by [Note: units by dtype], each with the unit of `find_units` that contains it."""
    names = {name for unit in units for name in unit.names}
    taken: set[nn.Parameter] = set()
    found: list[tuple[FSDPUnit, FSDPUnit]] = []
    for unit in units:
        owners: dict[torch.dtype, dict[str, int]] = {}
        for name in unit.names:
            prefix = f"{name}." if name else ""
            for leaf, parameter in model.get_submodule(name).named_parameters():
                if parameter not in taken:
                    taken.add(parameter)
                    if parameter.requires_grad:
                        owners.setdefault(parameter.dtype, {})[prefix + leaf] = parameter.numel()
        main_dtype = max(owners, key=lambda dtype: sum(owners[dtype].values()), default=None)
        for dtype, sizes in owners.items():
            if dtype != main_dtype:
                owner_names = [_find_owning_module(model, unit, leaf, names) for leaf in sizes]
                if None in owner_names:
                    both = " and ".join(f"{next(iter(owned))} ({each})" for each, owned in owners.items())
                    raise ModelError(
                        f"fsdp2 reduces the gradients of {unit.names[0] or 'the root'} together, but {both} differ in "
                        f"dtype, and no module within it holds those of one. Convert the model to one dtype "
                        f"(model.to(torch.float32), with mp_policy.param_dtype to compute in another), or freeze the "
                        f"parameters of one."
                    )
                modules = tuple(dict.fromkeys(owner for owner in owner_names if owner is not None))
                found.append((replace(unit, names=modules, dtype=dtype, is_block=False), unit))
    return found


def _find_owning_module(model: nn.Module, unit: FSDPUnit, parameter: str, unit_names: Collection[str]) -> str | None:
    """Return the outermost module within a unit that is called, contains a parameter and is not a unit itself."""
    if len(unit.names) > 1:
        return None
    prefix = f"{unit.names[0]}." if unit.names[0] else ""
    parts = parameter.removeprefix(prefix).split(".")[:-1]
    for count in range(1, len(parts) + 1):
        name = prefix + ".".join(parts[:count])
        if name not in unit_names and not isinstance(model.get_submodule(name), nn.ModuleList | nn.ModuleDict):
            return name
    return None


def find_nested_unit_modules(model: nn.Module, layout: ModelLayout) -> list[str]:
    """Return the non-expert modules of an unsharded model that are gathered separately within blocks."""
    units = find_units(model, layout)
    shared = [unit for unit in units if not (unit.is_block or unit.is_root or unit.is_experts)]
    return [
        name for unit in (*shared, *(inner for inner, _ in split_units_by_dtype(model, units))) for name in unit.names
    ]


def _find_shared_modules(
    model: nn.Module, layout: ModelLayout, tied: Sequence[tuple[str, ...]]
) -> list[tuple[str, ...]]:
    """Return the largest modules within blocks that have only shared parameters, grouped by what they share."""
    all_names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    shared_names = {name for names in tied for name in names}
    groups: list[set[str]] = []
    for names in tied:
        group = {
            _find_largest_shared_module(name, _find_block(name, layout) or "", all_names, shared_names)
            for name in names
        }
        # Merge overlapping sets.
        for other in [each for each in groups if each & group]:
            groups.remove(other)
            group |= other
        groups.append(group)
    order = {name: index for index, (name, _) in enumerate(model.named_modules(remove_duplicate=False))}
    return [tuple(sorted(group, key=order.__getitem__)) for group in groups]


def _find_largest_shared_module(parameter: str, block: str, all_names: Sequence[str], shared: set[str]) -> str:
    module = parameter.rpartition(".")[0]
    while module != block:
        parent = module.rpartition(".")[0]
        if not all(name in shared for name in all_names if name.startswith(f"{parent}.")):
            break
        module = parent
    return module


def _find_block(name: str, layout: ModelLayout) -> str | None:
    return next((block for block in layout.blocks if name.startswith(f"{block}.")), None)

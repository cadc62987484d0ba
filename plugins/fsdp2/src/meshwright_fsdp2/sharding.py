"""Apply fully_shard to the units of a model, and hold what came of it.

What each unit is sharded with is in `unit_options`, and which modules are units in `units`.

[Note: sums] Gradients are reduced by plain sums ([Note: the gradient rule] in `meshwright.strategy.contract`): the
divide factor of every unit is 1. That also keeps clear of a division that torch applies twice on groups of one rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from meshwright.model.layout import ModelLayout
from meshwright.parallel.expert import ExpertParallel
from meshwright.parallel.tensor import TensorParallel

from . import schedule
from ._compat import begin_at, held_after_forward, reduce_unused
from .half_messages import HalfMessages
from .unit_options import UnitOptions
from .units import Unit, find_units, units_by_dtype


@dataclass(frozen=True)
class Sharding:
    """A model's units after `fully_shard`.

    Attributes:
        units: as found, innermost first, the root last; with the module that holds each one's state.
        model: the root.
    """

    units: tuple[tuple[Unit, FSDPModule], ...]
    model: nn.Module

    @property
    def root(self) -> FSDPModule:
        """The module of the root, whose methods act on all units."""
        return self.units[-1][1]

    @property
    def modules(self) -> list[FSDPModule]:
        """One module for each unit; modules of one unit share its state."""
        return [module for _, module in self.units]

    @property
    def named_modules(self) -> list[tuple[str, nn.Module]]:
        """Each module of each unit under its first name."""
        names = {self.model.get_submodule(name): name for unit, _ in self.units for name in reversed(unit.names)}
        return [(name, module) for module, name in names.items()]

    def prefetch(self, *, forward: int, backward: int) -> None:
        """Gather so many units ahead in forward and in backward; see `schedule.prefetch`.

        Units that blocks share are gathered where they are used.
        """
        inner = {unit.names[0]: module for unit, module in self.units if unit.is_experts or unit.dtype}
        blocks = [
            [module, *(each for name, each in inner.items() if name.startswith(f"{unit.names[0]}."))]
            for unit, module in self.units[:-1]
            if unit.is_block
        ]
        schedule.prefetch(self.root, blocks, forward=forward, backward=backward)

    def reshard(self) -> None:
        """Free all gathered parameters."""
        for module in self.modules:
            module.reshard()

    @contextmanager
    def unsharded(self) -> Iterator[None]:
        """Hold all parameters whole, also after a forward."""
        begin_at(self.root)
        with held_after_forward(self.modules):
            for module in self.modules:
                module.unshard()
            try:
                yield
            finally:
                self.reshard()


def shard_units(
    model: nn.Module,
    layout: ModelLayout,
    options: UnitOptions,
    *,
    with_root: bool = True,
    tensor_parallel: TensorParallel | None = None,
    expert_parallel: ExpertParallel | None = None,
) -> Sharding:
    """Shard `model` in place.

    Args:
        model: on any device, meta included.
        layout: of the model.
        options: how units are sharded, and along which mesh.
        with_root: whether what is left makes a unit.
        tensor_parallel: what has been applied to the model along `tp`.
        expert_parallel: what has been applied to it along `ep`.

    Raises:
        ModelError: a unit has trainable parameters of several dtypes, which no modules separate.
    """
    experts = expert_parallel.names if expert_parallel is not None else ()
    found = find_units(model, layout, experts)[: None if with_root else -1]
    apart = units_by_dtype(model, found)
    own = [(_of_dtype(model, unit), unit, around) for unit, around in apart]
    frozen = [all(not p.requires_grad for p in model.get_submodule(unit.names[0]).parameters()) for unit in found]
    done: list[tuple[Unit, FSDPModule]] = []
    kept_out = {parameter for parameters, _, _ in own for parameter in parameters}
    for unit in found:
        done.append((unit, _fully_shard(model, unit, options.arguments(unit, tensor_parallel), kept_out)))
        # Behind the unit around them, which else would leave out all that their modules hold.
        for parameters, inner, around in own:
            if around is unit:
                others = set(model.parameters()) - parameters
                module = _fully_shard(model, inner, options.arguments(inner, tensor_parallel), others)
                done.insert(len(done) - 1, (inner, module))
    for _, module in done if options.sends_halves else ():
        module.set_custom_reduce_scatter(HalfMessages())
    for unit, is_frozen in zip(found, frozen, strict=True):
        if is_frozen and (unit.is_block or unit.is_experts):
            schedule.skip_frozen_backward(model.get_submodule(unit.names[0]))
    return Sharding(tuple(done), model)


def _of_dtype(model: nn.Module, unit: Unit) -> set[nn.Parameter]:
    """The trainable parameters of a unit's dtype, before any is sharded."""
    modules = [model.get_submodule(name) for name in unit.names]
    return {p for module in modules for p in module.parameters() if p.requires_grad and p.dtype == unit.dtype}


def _fully_shard(model: nn.Module, unit: Unit, arguments: Mapping[str, Any], without: set[nn.Parameter]) -> FSDPModule:
    # One module under several names is gathered for each of its forwards; several modules, from the first forward to
    # the last.
    distinct = list(dict.fromkeys(model.get_submodule(name) for name in unit.names))
    sharded = fully_shard(distinct[0] if len(distinct) == 1 else distinct, **arguments, ignored_params=without)
    module: FSDPModule = sharded[0] if isinstance(sharded, list) else sharded
    sum_gradients(module)
    # Ranks may use different parameters: the others count as zero in the sum.
    reduce_unused(module)
    return module


def sum_gradients(unit: FSDPModule) -> None:
    """Let a unit sum its gradients over ranks; see [Note: sums]."""
    unit.set_gradient_divide_factor(1.0)
    unit.set_force_sum_reduction_for_comms(True)

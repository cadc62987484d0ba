"""Apply fully_shard to the units of a model.

[Note: sums] Gradients are reduced by plain sums ([Note: the gradient rule] in `meshwright.strategy.contract`): the
divide factor of every unit is 1. That also keeps clear of a division that torch applies twice on groups of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from meshwright.base.errors import ModelError
from meshwright.model.layout import ModelLayout
from meshwright.parallel.expert import ExpertParallel
from meshwright.parallel.tensor import TensorParallel, packed_dim

from . import schedule
from ._compat import held_after_forward
from .policies import of_blocks, of_dtype, of_experts
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
        """See `schedule.prefetch`. Units that blocks share are gathered where they are used."""
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
    mesh: DeviceMesh,
    *,
    mp_policy: MixedPrecisionPolicy,
    offload_policy: OffloadPolicy,
    reshard_after_forward: bool | int | None,
    with_root: bool = True,
    tensor_parallel: TensorParallel | None = None,
    expert_parallel: ExpertParallel | None = None,
    expert_mesh: DeviceMesh | None = None,
) -> Sharding:
    """Shard `model` in place.

    Args:
        model: on any device, meta included.
        layout: of the model.
        mesh: one axis to shard over, or (replicate, shard).
        mp_policy: of the root; blocks get it without `output_dtype`.
        offload_policy: of all units.
        reshard_after_forward: as in FSDP2Config.
        with_root: whether what is left makes a unit.
        tensor_parallel: what has been applied to the model along `tp`.
        expert_parallel: what has been applied to it along `ep`.
        expert_mesh: where experts are sharded, one axis of the expert mesh or (replicate, shard).

    Raises:
        ModelError: a unit has trainable parameters of several dtypes, which cannot be told apart by modules.
    """
    experts = expert_parallel.names if expert_parallel is not None else ()
    found = find_units(model, layout, experts)[: None if with_root else -1]
    apart = units_by_dtype(model, found)
    own = [(_of_dtype(model, unit), unit, around) for unit, around in apart]
    frozen = [all(not p.requires_grad for p in model.get_submodule(unit.names[0]).parameters()) for unit in found]
    done: list[tuple[Unit, FSDPModule]] = []
    kept_out = {parameter for parameters, _, _ in own for parameter in parameters}
    for unit in found:
        reshard = not unit.is_last if reshard_after_forward is None else reshard_after_forward
        if unit.is_experts and expert_mesh is not None:
            reshard = _reshard_experts(reshard, expert_mesh)
            options = _Options(expert_mesh, reshard, of_experts(mp_policy), offload_policy)
            placement: dict[str, Any] = {"shard_placement_fn": _place_experts(expert_mesh.size(-1))}
        else:
            policy = mp_policy if unit.is_root else of_blocks(mp_policy)
            options = _Options(mesh, reshard, policy, offload_policy)
            placement = _placement(mesh, tensor_parallel)
        module = _fully_shard(model, unit, options, placement | {"ignored_params": kept_out})
        done.append((unit, module))
        # Behind the unit around them, which else would leave out all that their modules hold.
        for parameters, inner, around in own:
            if around is unit and inner.dtype is not None:
                others = set(model.parameters()) - parameters
                options = replace(options, mp_policy=of_dtype(mp_policy, inner.dtype))
                module = _fully_shard(model, inner, options, placement | {"ignored_params": others})
                done.insert(len(done) - 1, (inner, module))
    for unit, is_frozen in zip(found, frozen, strict=True):
        if is_frozen and (unit.is_block or unit.is_experts):
            schedule.skip_frozen_backward(model.get_submodule(unit.names[0]))
    return Sharding(tuple(done), model)


def _of_dtype(model: nn.Module, unit: Unit) -> set[nn.Parameter]:
    """The trainable parameters of a unit's dtype, before any is sharded."""
    modules = [model.get_submodule(name) for name in unit.names]
    return {p for module in modules for p in module.parameters() if p.requires_grad and p.dtype == unit.dtype}


@dataclass(frozen=True)
class _Options:
    """Arguments of `fully_shard`."""

    mesh: DeviceMesh
    reshard_after_forward: bool | int
    mp_policy: MixedPrecisionPolicy
    offload_policy: OffloadPolicy


def _fully_shard(model: nn.Module, unit: Unit, options: _Options, placement: dict[str, Any]) -> FSDPModule:
    # One module under several names is gathered for each of its forwards; several modules, from the first forward to
    # the last.
    distinct = list(dict.fromkeys(model.get_submodule(name) for name in unit.names))
    sharded = fully_shard(distinct[0] if len(distinct) == 1 else distinct, **vars(options), **placement)
    module: FSDPModule = sharded[0] if isinstance(sharded, list) else sharded
    sum_gradients(module)
    # Ranks may use different parameters: the others count as zero in the sum.
    module.set_reduce_scatter_unused_params(True, recurse=False)
    return module


def _placement(mesh: DeviceMesh, tensor_parallel: TensorParallel | None) -> dict[str, Any]:
    """Which dim of each parameter is sharded, where that is not the first."""
    if tensor_parallel is None:
        return {}
    shards = mesh.size(-1)

    def place(parameter: nn.Parameter) -> Shard | None:
        packed = packed_dim(parameter)
        if packed != 0:
            return None
        divided = [dim for dim in range(1, parameter.dim()) if parameter.shape[dim] % shards == 0]
        if not divided:
            raise ModelError(
                f"a parameter of shape {tuple(parameter.shape)} holds packed parts that tensor parallelism has sharded "
                f"along the first dim, and dp_shard={shards} divides no other. Choose a dp_shard that does, or name "
                f"it replicate in a tp_plan."
            )
        return Shard(divided[0])

    return {"shard_placement_fn": place}


def _place_experts(shards: int) -> Callable[[nn.Parameter], Shard | None]:
    """Along the first dim, that of experts; where each rank of `ep` has too few, along another that can be divided."""

    def place(parameter: nn.Parameter) -> Shard | None:
        local = parameter.to_local().shape if isinstance(parameter, DTensor) else parameter.shape
        return next((Shard(dim) for dim, size in enumerate(local) if size % shards == 0), None)

    return place


def _reshard_experts(reshard: bool | int, mesh: DeviceMesh) -> bool | int:
    """A number of ranks is that of `dp_shard`; experts may have fewer, which then all keep them."""
    if isinstance(reshard, bool) or reshard < mesh.size(-1):
        return reshard
    return True


def sum_gradients(unit: FSDPModule) -> None:
    """See [Note: sums]."""
    unit.set_gradient_divide_factor(1.0)
    unit.set_force_sum_reduction_for_comms(True)

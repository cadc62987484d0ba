"""Apply fully_shard to the units of a model, with sum reduction, prefetch, and no gather for frozen backwards.

[Note: sum reduction] Gradients are reduced by SUM ([Note: the gradient rule] in `meshwright.strategy.contract`): the
divide factor of every unit is 1. That also avoids a division that torch applies twice on groups of one rank.

[Note: parameter usage] FSDP reduces the gradients of a unit as one buffer. If ranks use different parameters, such as
experts chosen by the data, a missing gradient must count as zero; otherwise gradients of different parameters are added
up. A parameter that no rank uses must end up without a gradient, or weight decay and momentum would change it.
Source: FSDPModule of torch.distributed.fsdp.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from meshwright.plugin import ExpertParallel, GradientReport, ModelLayout, TensorParallel

from ._compat import init_root, keep_unsharded_after_forward, reduce_unused_params
from .unit_options import UnitOptions
from .units import FSDPUnit, find_units, split_units_by_dtype


@dataclass(frozen=True)
class ShardedUnits:
    """A model's units after `fully_shard`."""

    units: tuple[tuple[FSDPUnit, FSDPModule], ...]
    model: nn.Module

    @property
    def root(self) -> FSDPModule:
        return self.units[-1][1]

    @property
    def unit_modules(self) -> list[FSDPModule]:
        """One module for each unit; the modules of a unit share its state."""
        return [module for _, module in self.units]

    @property
    def named_modules(self) -> list[tuple[str, nn.Module]]:
        """Each module of each unit, with its first name."""
        names = {self.model.get_submodule(name): name for unit, _ in self.units for name in reversed(unit.names)}
        return [(name, module) for module, name in names.items()]

    def set_prefetch(self, *, forward: int, backward: int) -> None:
        """Gather this many units ahead in forward and in backward, across stacks, each with its nested units.

        Units that blocks share are gathered when they are used.
        """
        inner = {unit.names[0]: module for unit, module in self.units if unit.is_experts or unit.dtype}
        blocks = [
            [module, *(each for name, each in inner.items() if name.startswith(f"{unit.names[0]}."))]
            for unit, module in self.units[:-1]
            if unit.is_block
        ]
        for chain, depth, set_prefetch in (
            ([[self.root], *blocks], forward, FSDPModule.set_modules_to_forward_prefetch),
            ([[self.root], *reversed(blocks)], backward, FSDPModule.set_modules_to_backward_prefetch),
        ):
            for index, (module, *inside) in enumerate(chain):
                following = (each for units in chain[index + 1 : index + 1 + depth] for each in units)
                set_prefetch(module, [*inside, *following])

    def reshard(self) -> None:
        for module in self.unit_modules:
            module.reshard()

    @contextmanager
    def unshard(self) -> Iterator[None]:
        """Keep all parameters unsharded within the context, also after a forward."""
        init_root(self.root)
        with keep_unsharded_after_forward(self.unit_modules):
            for module in self.unit_modules:
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
    shard_root: bool = True,
    tensor_parallel: TensorParallel | None = None,
    expert_parallel: ExpertParallel | None = None,
) -> ShardedUnits:
    """Shard `model` in place, on any device. Without the root, parameters in no other unit stay unsharded."""
    experts = expert_parallel.module_names if expert_parallel is not None else ()
    units = find_units(model, layout, experts)[: None if shard_root else -1]
    dtype_units = split_units_by_dtype(model, units)
    inner_units = [(_select_by_dtype(model, unit), unit, outer) for unit, outer in dtype_units]
    frozen = [all(not p.requires_grad for p in model.get_submodule(unit.names[0]).parameters()) for unit in units]
    sharded_units: list[tuple[FSDPUnit, FSDPModule]] = []
    ignored_params = {parameter for parameters, _, _ in inner_units for parameter in parameters}
    for unit in units:
        sharded_units.append(
            (unit, _fully_shard(model, unit, options.fully_shard_kwargs(unit, tensor_parallel), ignored_params))
        )
        # After the outer unit: `fully_shard` would otherwise ignore all parameters of the inner unit's modules.
        for parameters, inner, outer in inner_units:
            if outer is unit:
                others = set(model.parameters()) - parameters
                module = _fully_shard(model, inner, options.fully_shard_kwargs(inner, tensor_parallel), others)
                sharded_units.insert(len(sharded_units) - 1, (inner, module))
    for _, module in sharded_units if options.reduces_in_bfloat16 else ():
        module.set_custom_reduce_scatter(BFloat16ReduceScatter())
    for unit, is_frozen in zip(units, frozen, strict=True):
        if is_frozen and (unit.is_block or unit.is_experts):
            # torch gathers a unit before its backward even if it has none, such as a frozen tower before trained
            # layers.
            model.get_submodule(unit.names[0]).register_forward_hook(_set_unshard_in_backward)
    return ShardedUnits(tuple(sharded_units), model)


def _select_by_dtype(model: nn.Module, unit: FSDPUnit) -> set[nn.Parameter]:
    modules = [model.get_submodule(name) for name in unit.names]
    return {p for module in modules for p in module.parameters() if p.requires_grad and p.dtype == unit.dtype}


def _fully_shard(
    model: nn.Module, unit: FSDPUnit, arguments: Mapping[str, Any], ignored_params: set[nn.Parameter]
) -> FSDPModule:
    # A module with several names is gathered for each of its forwards; several modules are gathered from the first
    # forward to the last.
    modules = list(dict.fromkeys(model.get_submodule(name) for name in unit.names))
    sharded = fully_shard(modules[0] if len(modules) == 1 else modules, **arguments, ignored_params=ignored_params)
    module: FSDPModule = sharded[0] if isinstance(sharded, list) else sharded
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
    # Ranks may use different parameters: missing gradients count as zero.
    reduce_unused_params(module)
    return module


# -- frozen units: gathered for backward only if their output requires a gradient


def _set_unshard_in_backward(unit: nn.Module, args: Any, output: Any) -> None:
    if isinstance(unit, FSDPModule):
        unit.set_unshard_in_backward(_may_require_grad(output))


def _may_require_grad(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.requires_grad
    if value is None or isinstance(value, bool | int | float | str):
        return False
    if isinstance(value, dict):
        return any(map(_may_require_grad, value.values()))
    if isinstance(value, tuple | list):
        return any(map(_may_require_grad, value))
    if is_dataclass(value):
        return any(_may_require_grad(getattr(value, each.name)) for each in fields(value))
    # An unknown object may hold tensors.
    return True


class BFloat16ReduceScatter:
    """Reduce-scatter for one unit, with gradients sent in bfloat16 and summed in float32.

    Each rank rounds what it sends once, and the receiver sums in rank order. A reduce-scatter in bfloat16 would round
    each partial sum. Source: `ReduceScatter` of torch.distributed.fsdp.
    """

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Sum `input_tensor`, the concatenated chunks of all ranks, into this rank's chunk, 1-D."""
        sent = input_tensor.to(torch.bfloat16)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        torch.sum(received.view(group.size(), -1), 0, dtype=output_tensor.dtype, out=output_tensor)


class ParameterUsage:
    """Record which unsharded parameters get a gradient; see [Note: parameter usage].

    `modules` are those of units, each with its first name.
    """

    def __init__(self, model: nn.Module, modules: Sequence[tuple[str, nn.Module]]) -> None:
        self._parameter_by_name = dict(model.named_parameters())
        # Unsharded parameters are plain tensors, or DTensors on the one axis that FSDP does not gather: `tp` or `ep`.
        self._sharded_mesh_ndim = {
            name: p.device_mesh.ndim for name, p in self._parameter_by_name.items() if isinstance(p, DTensor)
        }
        self._used: set[str] = set()
        self._hooked_parameters: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        for name, unit in modules:
            # Registered after FSDP's own hook, which puts the unsharded parameters in place.
            unit.register_forward_pre_hook(partial(self._register_grad_hooks, f"{name}." if name else ""))

    def _register_grad_hooks(self, prefix: str, unit: nn.Module, args: Any) -> None:
        # FSDP keeps the objects of unsharded parameters. Within `unshard` a module may have other ones, so they are not
        # identified by name.
        for name, parameter in unit.named_parameters():
            fqn = prefix + name
            if self._is_sharded(fqn, parameter) or parameter in self._hooked_parameters or not parameter.requires_grad:
                continue
            self._hooked_parameters[parameter] = None
            parameter.register_post_accumulate_grad_hook(partial(self._record_use, fqn))

    def _record_use(self, fqn: str, parameter: nn.Parameter) -> None:
        # torch also calls this if an operation returned no gradient.
        if parameter.grad is not None:
            self._used.add(fqn)

    def _is_sharded(self, fqn: str, parameter: nn.Parameter) -> bool:
        if not isinstance(parameter, DTensor):
            return False
        axes = parameter.device_mesh.ndim
        # A parameter with several names is recorded under its first.
        return axes == self._sharded_mesh_ndim.get(fqn, axes)

    def build_report(self) -> GradientReport:
        """Return which parameters got a gradient on this rank since the last call."""
        trainable = {name: parameter for name, parameter in self._parameter_by_name.items() if parameter.requires_grad}
        is_used = [name in self._used for name in trainable]
        self._used.clear()
        return GradientReport([[parameter] for parameter in trainable.values()], is_used)

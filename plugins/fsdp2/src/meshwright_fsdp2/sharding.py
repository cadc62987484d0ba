"""Apply fully_shard to the units of a model, which sum gradients, gather ahead, and skip frozen backwards.

[Note: sums] Gradients are reduced by plain sums ([Note: the gradient rule] in `meshwright.strategy.contract`): the
divide factor of every unit is 1. That also avoids a division that torch applies twice on groups of one rank.

[Note: usage] FSDP reduces the gradients of a unit as one buffer. Where ranks use different parameters (experts chosen
by the data), a missing gradient must count as zero, or gradients of different parameters are added up. A parameter that
no rank uses must end up without gradient, or weight decay and momentum would move it.
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
        """One module for each unit; modules of one unit share its state."""
        return [module for _, module in self.units]

    @property
    def named_modules(self) -> list[tuple[str, nn.Module]]:
        """Each module of each unit under its first name."""
        names = {self.model.get_submodule(name): name for unit, _ in self.units for name in reversed(unit.names)}
        return [(name, module) for module, name in names.items()]

    def set_prefetch(self, *, forward: int, backward: int) -> None:
        """Gather that many units ahead in forward and in backward, across stacks, each with the units within it.

        Units that blocks share are gathered where they are used.
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
        """Hold all parameters whole, also after a forward."""
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
    """Shard `model`, on any device, in place; without the root, what is in no other unit is left alone."""
    experts = expert_parallel.module_names if expert_parallel is not None else ()
    found = find_units(model, layout, experts)[: None if shard_root else -1]
    apart = split_units_by_dtype(model, found)
    own = [(_select_by_dtype(model, unit), unit, around) for unit, around in apart]
    frozen = [all(not p.requires_grad for p in model.get_submodule(unit.names[0]).parameters()) for unit in found]
    done: list[tuple[FSDPUnit, FSDPModule]] = []
    kept_out = {parameter for parameters, _, _ in own for parameter in parameters}
    for unit in found:
        done.append((unit, _fully_shard(model, unit, options.fully_shard_kwargs(unit, tensor_parallel), kept_out)))
        # After the unit around them, which would otherwise leave out all that their modules hold.
        for parameters, inner, around in own:
            if around is unit:
                others = set(model.parameters()) - parameters
                module = _fully_shard(model, inner, options.fully_shard_kwargs(inner, tensor_parallel), others)
                done.insert(len(done) - 1, (inner, module))
    for _, module in done if options.reduces_in_bfloat16 else ():
        module.set_custom_reduce_scatter(BFloat16ReduceScatter())
    for unit, is_frozen in zip(found, frozen, strict=True):
        if is_frozen and (unit.is_block or unit.is_experts):
            # torch gathers a unit before its backward even where it has none, as a frozen tower before what trains.
            model.get_submodule(unit.names[0]).register_forward_hook(_set_unshard_in_backward)
    return ShardedUnits(tuple(done), model)


def _select_by_dtype(model: nn.Module, unit: FSDPUnit) -> set[nn.Parameter]:
    modules = [model.get_submodule(name) for name in unit.names]
    return {p for module in modules for p in module.parameters() if p.requires_grad and p.dtype == unit.dtype}


def _fully_shard(
    model: nn.Module, unit: FSDPUnit, arguments: Mapping[str, Any], ignored_params: set[nn.Parameter]
) -> FSDPModule:
    # One module under several names is gathered for each of its forwards; several modules, from the first forward to
    # the last.
    distinct = list(dict.fromkeys(model.get_submodule(name) for name in unit.names))
    sharded = fully_shard(distinct[0] if len(distinct) == 1 else distinct, **arguments, ignored_params=ignored_params)
    module: FSDPModule = sharded[0] if isinstance(sharded, list) else sharded
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
    # Ranks may use different parameters: the others count as zero in the sum.
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
    """A reduce-scatter for one unit whose gradients travel in bfloat16 and are summed in float32.

    Each rank rounds what it sends, once, and the receiver adds up in the order of the ranks. A reduce-scatter in
    bfloat16 would round each partial sum. Source: `ReduceScatter` of torch.distributed.fsdp.
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
        """Sum `input_tensor`, the parts of all ranks one after the other, into this rank's part, 1-D."""
        sent = input_tensor.to(torch.bfloat16)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        torch.sum(received.view(group.size(), -1), 0, dtype=output_tensor.dtype, out=output_tensor)


class ParameterUsage:
    """Records which gathered parameters get a gradient; `modules` are those of units, each under its first name. See
    [Note: usage].
    """

    def __init__(self, model: nn.Module, modules: Sequence[tuple[str, nn.Module]]) -> None:
        self._parameter_by_name = dict(model.named_parameters())
        # Gathered ones are plain tensors, or DTensors on the one axis that is not gathered: `tp`, or `ep`.
        self._sharded_mesh_ndim = {
            name: p.device_mesh.ndim for name, p in self._parameter_by_name.items() if isinstance(p, DTensor)
        }
        self._used: set[str] = set()
        self._hooked_parameters: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        for name, unit in modules:
            # After FSDP's own hook, which puts the gathered parameters in place.
            unit.register_forward_pre_hook(partial(self._register_grad_hooks, f"{name}." if name else ""))

    def _register_grad_hooks(self, prefix: str, unit: nn.Module, args: Any) -> None:
        # FSDP keeps the objects of gathered parameters. Within `unshard` others may be in their places, so names do not
        # identify them.
        for name, parameter in unit.named_parameters():
            fqn = prefix + name
            if self._is_sharded(fqn, parameter) or parameter in self._hooked_parameters or not parameter.requires_grad:
                continue
            self._hooked_parameters[parameter] = None
            parameter.register_post_accumulate_grad_hook(partial(self._record_use, fqn))

    def _record_use(self, fqn: str, parameter: nn.Parameter) -> None:
        # torch calls this also where an operation has given no gradient.
        if parameter.grad is not None:
            self._used.add(fqn)

    def _is_sharded(self, fqn: str, parameter: nn.Parameter) -> bool:
        if not isinstance(parameter, DTensor):
            return False
        axes = parameter.device_mesh.ndim
        # Another name of a parameter is watched by its first.
        return axes == self._sharded_mesh_ndim.get(fqn, axes)

    def build_report(self) -> GradientReport:
        """Return which parameters got a gradient on this rank, after the backwards of a step."""
        trained = {name: parameter for name, parameter in self._parameter_by_name.items() if parameter.requires_grad}
        used = [name in self._used for name in trained]
        self._used.clear()
        return GradientReport([[parameter] for parameter in trained.values()], used)

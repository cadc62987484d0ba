"""Parameters that are DTensors on the `tp` axis, and plain local tensors while a module runs.

[Note: local parameters] A strategy that gathers parameters (fully_shard) puts DTensors on the `tp` axis into the
modules just before their forward. `inside` replaces those, and no others, while a module runs, and lets autograd give
the gradients back as DTensors. Each module replaces its own parameters, not those of a module in it that does so
itself: a gathered block may still be whole when the model starts, and fully_shard reduces a block's gradients as soon
as what was made of its parameters within the block has had its backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from .._compat import without_hooks

Slot: TypeAlias = "tuple[nn.Module, str]"


@dataclass(frozen=True, eq=False)
class Cut:
    """How a module sees one of its parameters.

    Attributes:
        partial: this rank's gradient covers a part of the computation.
        rows: the rows that are used of a replicated parameter; int64.
    """

    partial: bool = False
    rows: Tensor | None = None


class LocalParameters:
    """The parameters of one model.

    Args:
        model: whose parameters `distribute` will replace.
        mesh: the `tp` axis.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh) -> None:
        self._model = model
        self._mesh = mesh
        self._cuts: dict[Slot, Cut] = {}
        self._foreign: set[nn.Module] = set()
        self._taken: set[nn.Module] = set()

    def leave_alone(self, module: nn.Module) -> None:
        """A module that brings DTensors and hooks of its own, with what is in it."""
        self._foreign.update(module.modules())

    def distribute(self, placements: Mapping[str, Placement], cuts: Mapping[str, Cut]) -> None:
        """Make every parameter a DTensor; this rank's part alone stays in memory.

        Args:
            placements: for each name of each parameter; equal for names of one parameter.
            cuts: by name, where a module sees something else than its part.
        """
        made: dict[int, nn.Parameter] = {}
        for name, parameter in list(self._model.named_parameters(remove_duplicate=False)):
            if isinstance(parameter, DTensor):
                continue
            owner, _, own = name.rpartition(".")
            module = self._model.get_submodule(owner)
            if name in cuts:
                self._cuts[module, own] = cuts[name]
            if id(parameter) not in made:
                made[id(parameter)] = _distributed(parameter, self._mesh, placements[name])
            module._parameters[own] = made[id(parameter)]

    def take(self, module: nn.Module) -> list[Slot]:
        """Where a module, and what is in it, has parameters, for `inside`; they are not those of modules around it."""
        self._taken.add(module)
        return [(each, name) for each in self._within(module) for name, _ in each.named_parameters(recurse=False)]

    def _within(self, module: nn.Module) -> Iterator[nn.Module]:
        if module not in self._foreign:
            yield module
        for child in module.children():
            if child not in self._taken:
                yield from self._within(child)

    @contextmanager
    def inside(self, slots: Iterable[Slot]) -> Iterator[None]:
        """Local tensors in place of gathered parameters; see [Note: local parameters]."""
        replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
        local: dict[tuple[int, Cut], Tensor] = {}
        try:
            for module, name in slots:
                parameter = module._parameters[name]
                if not isinstance(parameter, DTensor) or not self._is_gathered(parameter):
                    continue
                cut = self._cuts.get((module, name), _WHOLE)
                key = (id(parameter), cut)
                if key not in local:
                    local[key] = _localized(parameter, cut)
                replaced.append((module, name, parameter))
                module._parameters[name] = local[key]
            yield
        finally:
            for module, name, parameter in replaced:
                module._parameters[name] = parameter

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Whole plain tensors in place of gathered parameters, and no foreign hooks. Collective."""
        replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
        made: dict[int, nn.Parameter] = {}
        for module in self._model.modules():
            for name, parameter in module._parameters.items():
                if not isinstance(parameter, DTensor) or not self._is_gathered(parameter):
                    continue
                if id(parameter) not in made:
                    full = parameter.detach().full_tensor()
                    made[id(parameter)] = nn.Parameter(full, requires_grad=parameter.requires_grad)
                replaced.append((module, name, parameter))
        try:
            for module, name, parameter in replaced:
                module._parameters[name] = made[id(parameter)]
            with ExitStack() as stack:
                for module in self._foreign:
                    stack.enter_context(without_hooks(module))
                yield
        finally:
            for module, name, parameter in replaced:
                module._parameters[name] = parameter

    def _is_gathered(self, parameter: DTensor) -> bool:
        """Whether a parameter lies on the `tp` axis alone, that is, whole but for it."""
        return parameter.device_mesh.ndim == 1 and parameter.device_mesh == self._mesh


_WHOLE = Cut()


def _distributed(parameter: nn.Parameter, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    whole = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
    own = DTensor.from_local(
        whole.to_local().clone(memory_format=torch.contiguous_format),
        mesh,
        [placement],
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )
    made = nn.Parameter(own, requires_grad=parameter.requires_grad)
    made.__dict__.update(parameter.__dict__)
    return made


def _localized(parameter: DTensor, cut: Cut) -> Tensor:
    local: Tensor = parameter.to_local(grad_placements=[Partial()] if cut.partial else None)
    return local if cut.rows is None else local[cut.rows.to(local.device)]

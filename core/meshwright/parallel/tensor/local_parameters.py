"""Parameters that are DTensors on the `tp` axis, and plain local tensors while a module runs.

[Note: local parameters] A strategy that gathers parameters (fully_shard) puts DTensors on the `tp` axis into a module
just before its forward. `inside` replaces them by local tensors while it runs, and autograd returns the gradients as
DTensors. A module leaves the parameters of a submodule that does so itself: a gathered block may still be full when the
model starts, and fully_shard reduces a block's gradients as soon as the backward of its own computation is done.

With `plain`, for strategies that take no DTensors, parameters are plain local tensors throughout, and only those are
replaced of which the module sees something else than the local shard or whose gradients must be summed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from ..._compat.torch import is_packed, is_sharded, own_parameters
from ...tensors.pieces import Piece, pieces_within
from ...tensors.state import whole_tensor
from .collectives import Copy

Slot: TypeAlias = "tuple[nn.Module, str]"


@dataclass(frozen=True)
class Division:
    """How one parameter of a full `shape` is placed on the mesh `tp`: sharded, perhaps in packed parts, or whole."""

    mesh: DeviceMesh
    placement: Placement
    shape: torch.Size

    @property
    def is_sharded(self) -> bool:
        return is_sharded(self.placement)

    def part(self, whole: Tensor) -> Tensor:
        """Return this rank's shard of a tensor that all ranks have, contiguous, in memory of its own."""
        part = distribute_tensor(whole, self.mesh, [self.placement], src_data_rank=None).to_local()
        return part.clone(memory_format=torch.contiguous_format)

    def whole(self, part: Tensor) -> Tensor:
        """Gather the full tensor on every rank. Collective where it is sharded."""
        return whole_tensor(self.distributed(part)) if self.is_sharded else part

    def pieces(self, pieces: list[Piece], shape: torch.Size) -> list[Piece]:
        """Return rectangles of the full tensor from those of this rank's shard, which has `shape`."""
        if not self.is_sharded:
            return pieces
        return pieces_within(pieces, self.distributed(torch.empty(shape, device="meta")))

    def distributed(self, part: Tensor) -> DTensor:
        """Wrap this rank's shard in a DTensor."""
        stride = torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(part, self.mesh, [self.placement], run_check=False, shape=self.shape, stride=stride)


def packed_dim(parameter: Tensor) -> int | None:
    """Return the dim along which a parameter holds packed parts that are sharded each; None for all others.

    A strategy must not shard that dim further: torch puts the parts together in a wrong order.
    """
    return parameter.placements[-1].dim if is_packed(parameter) else None


@dataclass(frozen=True, eq=False)
class Cut:
    """How a module sees a parameter: with partial gradients, or only some rows (int64) of a replicated one."""

    partial: bool = False
    rows: Tensor | None = None


class LocalParameters:
    """The parameters of one model on the mesh `tp`.

    Args:
        plain: leave plain tensors in the modules instead of DTensors.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, *, plain: bool = False) -> None:
        self._model = model
        self._mesh = mesh
        self._plain = plain
        self._cuts: dict[Slot, Cut] = {}
        self._placed: dict[Cut, Tensor] = {}
        self._divisions: dict[Slot, Division] = {}
        self._taken: set[nn.Module] = set()

    def distribute(self, divisions: Mapping[str, Division], cuts: Mapping[str, Cut]) -> None:
        """Shard every parameter; only this rank's shard stays in memory.

        Args:
            divisions: by each name of each parameter; equal for tied names.
            cuts: by name, where a module sees something else than the local shard.
        """
        made: dict[int, nn.Parameter] = {}
        for name, parameter in list(self._model.named_parameters(remove_duplicate=False)):
            if isinstance(parameter, DTensor):
                continue
            owner, _, own = name.rpartition(".")
            module = self._model.get_submodule(owner)
            self._divisions[module, own] = divisions[name]
            if name in cuts:
                self._cuts[module, own] = cuts[name]
            if id(parameter) not in made:
                made[id(parameter)] = _divided(parameter, divisions[name], self._plain)
            own_parameters(module)[own] = made[id(parameter)]

    @property
    def cut_modules(self) -> set[nn.Module]:
        """The modules that see something else of a parameter than the local shard."""
        return {module for module, _ in self._cuts}

    def take(self, module: nn.Module) -> list[Slot]:
        """Claim the parameters of a module and its submodules for `inside`, except those claimed already."""
        self._taken.add(module)
        return [(each, name) for each in self._within(module) for name, _ in each.named_parameters(recurse=False)]

    def _within(self, module: nn.Module) -> Iterator[nn.Module]:
        yield module
        for child in module.children():
            if child not in self._taken:
                yield from self._within(child)

    @contextmanager
    def inside(self, slots: Iterable[Slot]) -> Iterator[None]:
        """Put local tensors in place of gathered parameters; see [Note: local parameters]."""
        replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
        local: dict[tuple[int, Cut], Tensor] = {}
        try:
            for module, name in slots:
                parameter = own_parameters(module)[name]
                cut = self._cuts.get((module, name), _WHOLE)
                if not self._is_gathered(parameter) or (self._plain and cut is _WHOLE):
                    continue
                key = (id(parameter), cut)
                if key not in local:
                    local[key] = self._localized(parameter, cut)
                replaced.append((module, name, parameter))
                own_parameters(module)[name] = local[key]
            yield
        finally:
            for module, name, parameter in replaced:
                own_parameters(module)[name] = parameter

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Put full plain tensors in place of gathered parameters. Collective."""
        replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
        made: dict[int, nn.Parameter] = {}
        for module in self._model.modules():
            for name, parameter in own_parameters(module).items():
                if not self._is_gathered(parameter):
                    continue
                if id(parameter) not in made:
                    value = parameter.detach()
                    full = self._divisions[module, name].whole(value) if self._plain else whole_tensor(value)
                    made[id(parameter)] = nn.Parameter(full, requires_grad=parameter.requires_grad)
                replaced.append((module, name, parameter))
        try:
            for module, name, parameter in replaced:
                own_parameters(module)[name] = made[id(parameter)]
            yield
        finally:
            for module, name, parameter in replaced:
                own_parameters(module)[name] = parameter

    def _is_gathered(self, parameter: Tensor | None) -> bool:
        """Return whether a parameter is sharded on the `tp` axis alone; plain ones are."""
        if not isinstance(parameter, DTensor):
            return self._plain and parameter is not None
        return parameter.device_mesh.ndim == 1 and parameter.device_mesh == self._mesh

    def _localized(self, parameter: Tensor, cut: Cut) -> Tensor:
        if isinstance(parameter, DTensor):
            local: Tensor = parameter.to_local(grad_placements=[Partial()] if cut.partial else None)
        else:
            local = Copy.apply(parameter, self._mesh.get_group()) if cut.partial else parameter
        if cut.rows is None:
            return local
        if cut not in self._placed or self._placed[cut].device != local.device:
            # Once: a copy to a device waits for it.
            self._placed[cut] = cut.rows.to(local.device)
        return local.index_select(0, self._placed[cut])


_WHOLE = Cut()


def _divided(parameter: nn.Parameter, division: Division, plain: bool) -> nn.Parameter:
    part = division.part(parameter.detach())
    made = nn.Parameter(part if plain else division.distributed(part), requires_grad=parameter.requires_grad)
    made.__dict__.update(parameter.__dict__)
    return made

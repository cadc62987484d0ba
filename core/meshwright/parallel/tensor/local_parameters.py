"""Parameters that are DTensors on the `tp` axis, and plain local tensors while a module runs.

For strategies that take no DTensors, parameters are plain local tensors throughout. While a module runs, those of which
it sees something else than this rank's part, or whose gradients must be summed along the axis, are replaced.

[Note: local parameters] A strategy that gathers parameters (fully_shard) puts DTensors on the `tp` axis into the
modules just before their forward. `inside` replaces those, and no others, while a module runs, and lets autograd give
the gradients back as DTensors. Each module replaces its own parameters, not those of a module in it that does so
itself: a gathered block may still be whole when the model starts, and fully_shard reduces a block's gradients as soon
as what was made of its parameters within the block has had its backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from ..._compat.torch import own_parameters
from ...tensors.state import whole_tensor
from .collectives import Copy
from .division import Division

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
        """Divide every parameter; this rank's part alone stays in memory.

        Args:
            divisions: for each name of each parameter; equal for names of one parameter.
            cuts: by name, where a module sees something else than its part.
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
        """The modules that see something else of a parameter of theirs than this rank's part."""
        return {module for module, _ in self._cuts}

    def take(self, module: nn.Module) -> list[Slot]:
        """Where a module, and what is in it, has parameters, for `inside`; they are not those of modules around it."""
        self._taken.add(module)
        return [(each, name) for each in self._within(module) for name, _ in each.named_parameters(recurse=False)]

    def _within(self, module: nn.Module) -> Iterator[nn.Module]:
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
        """Whole plain tensors in place of gathered parameters. Collective."""
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
        """Whether a parameter is whole but for the `tp` axis; plain ones are, where this is asked."""
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

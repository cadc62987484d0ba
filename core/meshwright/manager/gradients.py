"""The gradients of a step after their reduction and before the optimizer: norm, scale, and copies on other stages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..mesh.mesh import Mesh
from ..model.layout import ModelLayout, in_order
from ..tensors.norms import Groups, scale_to_norm, squares_by_part, total_grad_norm
from ..tensors.state import Parts
from .ending import Findings


class Gradients:
    """The gradients of what one manager trains.

    Args:
        trainable: yields the parameters that train, each once, as they are after sharding.
        parts: how they are divided over ranks.
        wide: take norms in float64, so that they do not depend on the layout.
    """

    def __init__(
        self, trainable: Callable[[], Iterable[nn.Parameter]], parts: Parts, mesh: Mesh, *, wide: bool
    ) -> None:
        self._trainable, self._parts, self._mesh, self._wide = trainable, parts, mesh, wide
        self._findings = Findings()
        self._groups: dict[nn.Parameter, Groups] = {}

    def total_norm(self, norm_type: float, *, without: Collection[nn.Parameter] = ()) -> Tensor:
        """Return the total norm, float64, equal on all ranks, of all gradients except those of some parameters.
        Collective."""
        left_out = set(without)
        pairs = [(p.grad, p) for p in self._trainable() if p.grad is not None and p not in left_out]
        groups = [self.groups_of(parameter) for _, parameter in pairs]
        gradients = [grad for grad, _ in pairs]
        return total_grad_norm(gradients, norm_type, wide=self._wide, groups=groups, device=self._mesh.device)

    def norms_by_part(self, layout: ModelLayout, named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, float]:
        """Return the 2-norm of the gradients of each part of the model; see `StrategyManager.gradient_norms`."""
        parts = {parameter: layout.part_of(name) for name, parameter in named}
        names = in_order(parts.values())
        return dict(zip(names, self.squares(parts, names).sqrt().tolist(), strict=True))

    def squares(self, parts: Mapping[nn.Parameter, str], names: Sequence[str]) -> Tensor:
        """Return the sum of squares of the gradients of each part of the model, float64, (names,), on the CPU.
        Collective.

        Args:
            parts: the part of each parameter that counts.
        """
        numbers = {name: number for number, name in enumerate(names)}
        groups = [self.groups_of(parameter) for parameter in parts]
        each = [numbers[name] for name in parts.values()]
        return squares_by_part(list(parts), each, len(names), groups, wide=self._wide)

    def groups_of(self, parameter: nn.Parameter) -> Groups:
        """Return what divides a trained parameter."""
        if parameter not in self._groups:
            self._groups[parameter] = self._parts.groups(parameter)
        return self._groups[parameter]

    def scale(self, norm: Tensor, max_norm: float) -> None:
        """Multiply all gradients by min(1, max_norm / norm), in place."""
        scale_to_norm([p.grad for p in self._trainable() if p.grad is not None], norm, max_norm)

    def fill_missing(self) -> None:
        """Give zero gradients to parameters that have none on this rank, for strategies that reduce each by itself.

        Those that no rank has used lose them before the optimizer steps; see [Note: one wait] in `ending`.
        """
        parameters = list(self._trainable())
        self._findings = Findings([[each] for each in parameters], [each.grad is not None for each in parameters])
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def take_findings(self) -> Findings:
        """Return what `fill_missing` has found in this step."""
        findings, self._findings = self._findings, Findings()
        return findings

    # -- in a pipeline

    def trained_as(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return what the optimizer trains of a parameter of the model."""
        return parameter

    def copy_of(self, trained: nn.Parameter) -> Tensor:
        """Return the gradient as it is added to those of copies on other stages, of the same shape on each."""
        gradient = trained.grad if trained.grad is not None else torch.zeros_like(trained)
        return gradient.to_local() if isinstance(gradient, DTensor) else gradient

    def take_sum(self, trained: nn.Parameter, total: Tensor) -> None:
        """Replace the gradient by the sum of `copy_of` over stages, which may be modified. Collective on the stage."""
        if trained.grad is None:
            trained.grad = torch.zeros_like(trained)
        local = trained.grad.to_local() if isinstance(trained.grad, DTensor) else trained.grad
        local.copy_(total)

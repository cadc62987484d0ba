"""The gradients of a step between its backwards and the optimizer: their norm, their scale, and their copies.

How they are reduced is the strategy's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..mesh.mesh import Mesh
from ..tensors.norms import Groups, scale_to_norm, squares_by_part, total_grad_norm
from ..tensors.state import Parts
from .ending import Findings


class Gradients:
    """The gradients of what one manager trains.

    Args:
        trainable: the parameters that train, each once, as they are after sharding.
        parts: how they are divided over ranks.
        mesh: of the ranks that hold them.
        wide: take norms in float64, so that they do not depend on the layout.
    """

    def __init__(
        self, trainable: Callable[[], Iterable[nn.Parameter]], parts: Parts, mesh: Mesh, *, wide: bool
    ) -> None:
        self._trainable, self._parts, self._mesh, self._wide = trainable, parts, mesh, wide
        self._findings = Findings()
        self._groups: dict[nn.Parameter, Groups] = {}

    def total_norm(self, norm_type: float, *, without: Collection[nn.Parameter] = ()) -> Tensor:
        """The total norm of all gradients but those of some parameters. Collective.

        Returns:
            float64 scalar on the mesh's device, equal on all ranks.
        """
        left_out = set(without)
        pairs = [(p.grad, p) for p in self._trainable() if p.grad is not None and p not in left_out]
        groups = [self.groups_of(parameter) for _, parameter in pairs]
        gradients = [grad for grad, _ in pairs]
        return total_grad_norm(gradients, norm_type, wide=self._wide, groups=groups, device=self._mesh.device)

    def squares(self, parts: Mapping[nn.Parameter, str], names: Sequence[str]) -> Tensor:
        """Of the gradients of each part of the model the sum of squares. Collective.

        Args:
            parts: of what is trained, the name of the part; what is not among it is left out.
            names: of the parts.

        Returns:
            float64, (parts,), on the CPU, equal on all ranks.
        """
        numbers = {name: number for number, name in enumerate(names)}
        groups = [self.groups_of(parameter) for parameter in parts]
        each = [numbers[name] for name in parts.values()]
        return squares_by_part(list(parts), each, len(names), groups, wide=self._wide)

    def groups_of(self, parameter: nn.Parameter) -> Groups:
        """What divides a parameter that is trained, found once."""
        if parameter not in self._groups:
            self._groups[parameter] = self._parts.groups(parameter)
        return self._groups[parameter]

    def scale(self, norm: Tensor, max_norm: float) -> None:
        """Multiply all gradients by min(1, max_norm / norm), in place."""
        scale_to_norm([p.grad for p in self._trainable() if p.grad is not None], norm, max_norm)

    def fill_missing(self) -> None:
        """Give zeros to parameters that this rank has no gradient of, since other ranks may have one.

        For strategies that reduce parameter by parameter: afterwards all ranks have gradients of all parameters. Those
        that no rank has used lose it before the optimizer steps, as under `single`; see [Note: one wait] in `ending`.
        """
        parameters = list(self._trainable())
        self._findings = Findings(
            [[each] for each in parameters], [parameter.grad is not None for parameter in parameters]
        )
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def take_findings(self) -> Findings:
        """What `fill_missing` has seen in this step."""
        findings, self._findings = self._findings, Findings()
        return findings

    # -- in a pipeline

    def trained_as(self, parameter: nn.Parameter) -> nn.Parameter:
        """What the optimizer trains of a parameter of the model, which has its gradient after a step's backwards."""
        return parameter

    def copy_of(self, trained: nn.Parameter) -> Tensor:
        """Of what `trained_as` gives: its gradient as it is added to those of copies on other stages, of the same shape
        on each."""
        gradient = trained.grad if trained.grad is not None else torch.zeros_like(trained)
        return gradient.to_local() if isinstance(gradient, DTensor) else gradient

    def take_sum(self, trained: nn.Parameter, total: Tensor) -> None:
        """Make the sum of what `copy_of` has given on all stages the gradient. Collective on the stage.

        Args:
            total: it may be changed.
        """
        if trained.grad is None:
            trained.grad = torch.zeros_like(trained)
        local = trained.grad.to_local() if isinstance(trained.grad, DTensor) else trained.grad
        local.copy_(total)

"""The gradients of a step after its last backward: reports of all ranks, norm, and clipping.

[Note: one wait] One all-reduce on the device sums the loss, the flags of used parameters, and an error flag. The host
reads the result once, together with other scalars (`StrategyManager.read_scalars`), or when the optimizer steps. It
does not read it if no error is possible. Until then the gradient of a parameter that no rank has used is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..base.errors import MeshwrightError
from ..mesh.mesh import Mesh
from ..mesh.world import World
from ..model.layout import ModelLayout, sort_parts
from ..tensors.norms import ShardGroups, clip_grads_with_norm, compute_grad_norm, sum_squares_by_part
from ..tensors.state import ShardLayout


@dataclass(frozen=True)
class GradientReport:
    """What one rank reports about the gradients of a step.

    Attributes:
        trained: for each parameter, the tensors that the optimizer trains here; in the same order on all ranks that sum
            reports.
        is_used: whether this rank has used each parameter in the step.
        has_error: whether there is an error, as bool or scalar on the device; None, on all ranks: no error is possible.
        error_values: argument of `build_error`. Floating point, 1-D, on the device.
        build_error: returns the error, or None.
        on_error: called if any rank has an error, after gradients were dropped.
    """

    trained: Sequence[Sequence[nn.Parameter]] = ()
    is_used: Sequence[bool] = ()
    has_error: Tensor | bool | None = None
    error_values: Tensor | None = None
    build_error: Callable[[Sequence[float]], MeshwrightError | None] = lambda values: None
    on_error: Callable[[], None] | None = None

    def iter_unused(self, used_flags: Sequence[float] | None = None) -> Iterator[nn.Parameter]:
        """Iterate over the trained tensors of unused parameters. `used_flags` replaces this rank's `is_used`."""
        for each, is_used in zip(self.trained, self.is_used if used_flags is None else used_flags, strict=True):
            if not is_used:
                yield from each

    def discard(self) -> None:
        for parameter in chain.from_iterable(self.trained):
            parameter.grad = None
        if self.on_error is not None:
            self.on_error()

    def finalize(self, world: World) -> None:
        """Resolve the report at once through the control plane, for custom training loops. Collective.

        Raises any rank's error on all ranks.
        """
        error = self.build_error(self.error_values.tolist() if self.error_values is not None else ())
        (num_errors,), used = world.reduce_sum_and_max([error is not None], self.is_used)
        if num_errors:
            self.discard()
            world.raise_first_error(error)
        for parameter in self.iter_unused(used):
            parameter.grad = None


class StepReduction:
    """The reduction at the end of a step: reports of each stage, and one of parameters that several stages train."""

    def __init__(self, reports: Sequence[GradientReport] = (), shared_report: GradientReport | None = None) -> None:
        self._reports, self._shared_report = reports, shared_report or GradientReport()
        self._all = (self._shared_report, *reports)
        self._is_used = [float(is_used) for part in self._all for is_used in part.is_used]
        self._can_fail = any(part.has_error is not None for part in reports)
        self._sums: Tensor | None = None

    def all_reduce(
        self,
        losses: Sequence[Tensor],
        device: torch.device,
        *,
        group: dist.ProcessGroup,
        extra_sums: Tensor | None = None,
        replica_group: dist.ProcessGroup | None = None,
        stage_group: dist.ProcessGroup | None = None,
    ) -> Tensor:
        """Sum the losses, the extra sums and the reports. Collective.

        Returns the sum of the losses followed by the extra sums: float64, 1-D.
        """
        count = 1 + (0 if extra_sums is None else extra_sums.numel())
        errors = [part.has_error for part in self._reports if part.has_error is not None]
        num_known_errors = float(sum(each for each in errors if isinstance(each, bool)))
        sums = torch.tensor([0.0] * count + [num_known_errors, *self._is_used], dtype=torch.float64).to(
            device, non_blocking=True
        )
        if losses:
            sums[0] += torch.stack(list(losses)).sum(dtype=torch.float64)
        if extra_sums is not None:
            sums[1:count] += extra_sums
        for each in errors:
            if isinstance(each, Tensor):
                sums[count] += each
        dist.all_reduce(sums, group=group)
        if replica_group is not None and self._can_fail:
            dist.all_reduce(sums[count : count + 1], group=replica_group)
        if stage_group is not None:
            dist.all_reduce(sums[: count + 1 + len(self._shared_report.is_used)], group=stage_group)
        self._sums = sums[count:]
        return sums[:count]

    def finalize(self, world: World, extra_scalars: Sequence[Tensor] = ()) -> list[float]:
        """Drop, once, the gradients that no rank has used.

        Returns the values of `extra_scalars`, which are read with the same wait for the device.
        """
        sums, self._sums = self._sums, None
        unused = (each for part in self._all for each in part.iter_unused())
        must_read = self._can_fail or any(part.error_values is not None for part in self._reports)
        if sums is None or (not must_read and next(unused, None) is None):
            return _read_scalars([each.detach().reshape(1) for each in extra_scalars]) if extra_scalars else []
        error_values = [part.error_values for part in self._reports if part.error_values is not None]
        scalars = iter(_read_scalars([each.detach().reshape(1) for each in extra_scalars] + [sums, *error_values]))
        values, num_errors = [next(scalars) for _ in extra_scalars], next(scalars)
        used = [next(scalars) for _ in range(sums.numel() - 1)]
        # In a planned world the sums have no values, since they include losses.
        used = world.select(used, self._is_used)
        errors = [
            part.build_error(
                [next(scalars) for _ in range(part.error_values.numel())] if part.error_values is not None else ()
            )
            for part in self._reports
        ]
        if num_errors:
            for part in self._all:
                part.discard()
            world.raise_first_error(next((error for error in errors if error is not None), None))
        # A parameter that another stage has used also has its gradient here.
        shared = {parameter for each in self._shared_report.trained for parameter in each}
        for part in self._all:
            part_used, used = used[: len(part.is_used)], used[len(part.is_used) :]
            for parameter in part.iter_unused(part_used):
                if part is self._shared_report or parameter not in shared:
                    parameter.grad = None
        return values


def _read_scalars(tensors: Sequence[Tensor]) -> list[float]:
    """Read 1-D tensors with one wait for the device."""
    device = tensors[0].device
    values: list[float] = torch.cat([each.to(device, torch.float64) for each in tensors]).tolist()
    return values


class Gradients:
    """The gradients of the parameters that one manager trains.

    With `use_float64`, norms are computed in float64 and do not depend on the layout.
    """

    def __init__(
        self,
        iter_trainable: Callable[[], Iterable[nn.Parameter]],
        shard_layout: ShardLayout,
        mesh: Mesh,
        *,
        use_float64: bool,
    ) -> None:
        self._iter_trainable = iter_trainable
        self._shard_layout = shard_layout
        self._mesh = mesh
        self._use_float64 = use_float64
        self._report = GradientReport()
        self._groups: dict[nn.Parameter, ShardGroups] = {}

    def compute_total_norm(self, norm_type: float, *, excluded: Collection[nn.Parameter] = ()) -> Tensor:
        """Return the norm of all gradients except those of `excluded`; float64, equal on all ranks. Collective."""
        excluded_set = set(excluded)
        counted = [each for each in self._iter_trainable() if each.grad is not None and each not in excluded_set]
        gradients = [each.grad for each in counted if each.grad is not None]
        groups = [self.get_shard_groups(each) for each in counted]
        return compute_grad_norm(
            gradients, norm_type, use_float64=self._use_float64, groups=groups, device=self._mesh.device
        )

    def compute_norms_by_part(self, layout: ModelLayout, named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, float]:
        parts = {parameter: layout.find_part(name) for name, parameter in named}
        names = sort_parts(parts.values())
        return dict(zip(names, self.sum_squares(parts, names).sqrt().tolist(), strict=True))

    def sum_squares(self, parts: Mapping[nn.Parameter, str], names: Sequence[str]) -> Tensor:
        """Return the sum of squares of each part's gradients: float64, (names,), on the CPU. Collective."""
        groups = [self.get_shard_groups(parameter) for parameter in parts]
        numbers = [names.index(name) for name in parts.values()]
        return sum_squares_by_part(list(parts), numbers, len(names), groups, use_float64=self._use_float64)

    def get_shard_groups(self, parameter: nn.Parameter) -> ShardGroups:
        if parameter not in self._groups:
            self._groups[parameter] = self._shard_layout.get_shard_groups(parameter)
        return self._groups[parameter]

    def clip(self, norm: Tensor, max_norm: float) -> None:
        clip_grads_with_norm([p.grad for p in self._iter_trainable() if p.grad is not None], norm, max_norm)

    def fill_missing(self) -> None:
        """Give unused parameters zero gradients, for strategies that reduce each separately; see [Note: one wait]."""
        parameters = list(self._iter_trainable())
        self._report = GradientReport([[each] for each in parameters], [each.grad is not None for each in parameters])
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def take_report(self) -> GradientReport:
        report, self._report = self._report, GradientReport()
        return report

    # -- in a pipeline

    def get_optimizer_parameter(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the tensor that the optimizer trains for a parameter of the model."""
        return parameter

    def get_local_gradient(self, trained: nn.Parameter) -> Tensor:
        """Return the gradient that is summed with those of copies on other stages; of equal shape on each stage."""
        gradient = trained.grad if trained.grad is not None else torch.zeros_like(trained)
        return gradient.to_local() if isinstance(gradient, DTensor) else gradient

    def set_summed_gradient(self, trained: nn.Parameter, total: Tensor) -> None:
        """Replace the gradient by `total`, the sum of `get_local_gradient` over stages. Collective on the stage.

        `total` may be modified.
        """
        if trained.grad is None:
            trained.grad = torch.zeros_like(trained)
        self.get_local_gradient(trained).copy_(total)

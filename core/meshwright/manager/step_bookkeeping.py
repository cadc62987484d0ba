"""State of a manager between steps: pending reductions, known objectives, and trainable parameters.

[Note: frozen later] Strategies create units and hooks for the parameters that are trainable when `parallelize` is
called. A parameter that is frozen later still gets a gradient, because within a step all parameters have the flags of
`parallelize`. That gradient is dropped before the norm is computed and the optimizer steps. A parameter that was frozen
in `parallelize` cannot be trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch.distributed as dist
from torch import Tensor, nn

from ..base.errors import ConfigError, MeshwrightError, StrategyError
from ..base.types import Objective
from ..mesh.mesh import Mesh
from ..step.objective import MODEL_KEYS, BoundObjective, ObjectiveAccumulator
from ..step.tokens import StatisticsRecorder
from .gradients import GradientReport, StepReduction


class TrainableParameters:
    """The trainable parameters of one model by name; see [Note: frozen later]."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, parameter) for name, parameter in self._model.named_parameters() if name in self._names)

    def find_frozen(self) -> set[str]:
        return {name for name, parameter in self.named_parameters() if not parameter.requires_grad}

    def check_unfrozen(self) -> None:
        """Raise StrategyError for a parameter that requires a gradient but was frozen in `parallelize`."""
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and name not in self._names:
                raise StrategyError(
                    f"{name} requires a gradient, but was frozen when the model was parallelized, so no optimizer "
                    f"holds it. Call parallelize with all parameters unfrozen that are to train at some time, and "
                    f"freeze them afterwards."
                )

    @contextmanager
    def temporarily_unfrozen(self) -> Iterator[None]:
        """Restore the `requires_grad` flags of `parallelize` within the context."""
        frozen = [parameter for _, parameter in self.named_parameters() if not parameter.requires_grad]
        for parameter in frozen:
            parameter.requires_grad_(True)
        try:
            yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)


_MAX_KNOWN_OBJECTIVES = 8
"""Number of recent objectives that are not probed again."""


class StepBookkeeping:
    """State of one manager between steps. `iter_trainable` yields what it trains on this rank."""

    def __init__(self, mesh: Mesh, iter_trainable: Callable[[], Iterable[nn.Parameter]]) -> None:
        self._mesh, self._iter_trainable, self._reduction = mesh, iter_trainable, StepReduction()
        self._known_objectives: list[tuple[BoundObjective, tuple[str, ...]]] = []
        self.last_sums: Mapping[str, Tensor] = {}

    # -- objectives

    def bind_objective(self, objective: Objective | None, argument_names: frozenset[str]) -> BoundObjective | None:
        if objective is None:
            return None
        new = BoundObjective(objective, argument_names | MODEL_KEYS)
        return next((known for known, _ in self._known_objectives if known == new), new)

    def bind_recorder(self, recorder: StatisticsRecorder, argument_names: frozenset[str]) -> BoundObjective | None:
        """Return the `BoundObjective` of a recorder, which requests only the statistics that it records."""
        if (bound := self.bind_objective(recorder, argument_names)) is not None:
            bound.expect_statistics(recorder.names)
        return bound

    def start_accumulator(
        self, objective: BoundObjective | None, probe: Callable[[BoundObjective], tuple[str, ...]] | None
    ) -> ObjectiveAccumulator | None:
        """Return an objective's accumulator for one step. A new objective is probed first, which is collective."""
        if objective is None:
            return None
        names = next((names for known, names in self._known_objectives if known is objective), None)
        if names is None:
            world = self._mesh.world
            own_names = world.run_on_all_ranks(lambda: probe(objective) if probe is not None else None)
            all_names: list[tuple[str, ...] | None] = [None] * world.size
            dist.all_gather_object(all_names, own_names, group=world.group)
            distinct = {each for each in all_names if each is not None}
            if len(distinct) != 1:
                raise ConfigError(f"the {objective.name} returns other sums on different ranks: {sorted(distinct)}.")
            names = distinct.pop()
            self._known_objectives = [*self._known_objectives[1 - _MAX_KNOWN_OBJECTIVES :], (objective, names)]
        return ObjectiveAccumulator(objective, names, self._mesh.device)

    # -- end of a step

    def start_reduction(
        self,
        reports: Sequence[GradientReport],
        shared_report: GradientReport | None,
        accumulator: ObjectiveAccumulator | None,
    ) -> StepReduction:
        """Return the reduction of a step with the reports of its parts; see `StepReduction`."""
        self._reduction = StepReduction([*reports, *self._build_objective_reports(accumulator)], shared_report)
        return self._reduction

    def build_eval_reduction(self, accumulator: ObjectiveAccumulator | None) -> StepReduction:
        return StepReduction([replace(each, on_error=None) for each in self._build_objective_reports(accumulator)])

    def unpack_loss(self, total: Tensor, accumulator: ObjectiveAccumulator | None, reduction: StepReduction) -> Tensor:
        """Return the loss, a scalar, and store the extra sums; `total` is summed over all ranks."""
        self.last_sums = {} if accumulator is None else dict(zip(accumulator.names, total[1:].unbind(), strict=True))
        if reduction is not self._reduction:
            reduction.finalize(self._mesh.world)
        return total[0]

    def read_scalars(self, *values: Tensor) -> list[float]:
        return self._reduction.finalize(self._mesh.world, values)

    def finalize(self) -> None:
        """Finalize the last step's reduction before its gradients are used."""
        self._reduction.finalize(self._mesh.world)

    def _build_objective_reports(self, accumulator: ObjectiveAccumulator | None) -> list[GradientReport]:
        if accumulator is None:
            return []
        has_error = accumulator.has_nonfinite | (accumulator.error is not None)

        def build_error(values: Sequence[float]) -> MeshwrightError | None:
            return accumulator.get_error(bool(values[0]))

        def drop_gradients() -> None:
            for parameter in self._iter_trainable():
                parameter.grad = None

        return [
            GradientReport(
                has_error=has_error,
                error_values=has_error.double()[None],
                build_error=build_error,
                on_error=drop_gradients,
            )
        ]

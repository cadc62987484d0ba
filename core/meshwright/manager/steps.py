"""The steps of a manager: how they end, their objectives, and what they may train.

[Note: frozen later] Strategies lay out units and hooks for the parameters that train when `parallelize` is called. A
parameter that is frozen later still gets a gradient, since within a step all have the flags of `parallelize`; it is
dropped before the norm is taken and the optimizer steps. One that was frozen in `parallelize` cannot be trained.
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
    """The parameters of one model that may train, by name; see [Note: frozen later]."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, parameter) for name, parameter in self._model.named_parameters() if name in self._names)

    def frozen(self) -> set[str]:
        return {name for name, parameter in self.named() if not parameter.requires_grad}

    def check_unfrozen(self) -> None:
        """Refuse a parameter that requires a gradient now, but did not in `parallelize`; StrategyError on this rank."""
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and name not in self._names:
                raise StrategyError(
                    f"{name} requires a gradient, but was frozen when the model was parallelized, so no optimizer "
                    f"holds it. Call parallelize with all parameters unfrozen that are to train at some time, and "
                    f"freeze them afterwards."
                )

    @contextmanager
    def unfrozen(self) -> Iterator[None]:
        """Give all parameters the flags of `parallelize` within the context."""
        frozen = [parameter for _, parameter in self.named() if not parameter.requires_grad]
        for parameter in frozen:
            parameter.requires_grad_(True)
        try:
            yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)


_MAX_KNOWN_OBJECTIVES = 8
"""Number of recent objectives that are not tried again."""


class StepBookkeeping:
    """The steps of one manager; `iter_trainable` yields what it trains on this rank."""

    def __init__(self, mesh: Mesh, iter_trainable: Callable[[], Iterable[nn.Parameter]]) -> None:
        self._mesh, self._trainable, self._ending = mesh, iter_trainable, StepReduction()
        self._known: list[tuple[BoundObjective, tuple[str, ...]]] = []
        self.last_sums: Mapping[str, Tensor] = {}

    # -- objectives

    def given(self, objective: Objective | None, argument_names: frozenset[str]) -> BoundObjective | None:
        if objective is None:
            return None
        new = BoundObjective(objective, argument_names | MODEL_KEYS)
        return next((known for known, _ in self._known if known == new), new)

    def noting(self, recorder: StatisticsRecorder, argument_names: frozenset[str]) -> BoundObjective | None:
        """Return the `BoundObjective` of a recorder, which asks for the statistics it records and no others."""
        if (given := self.given(recorder, argument_names)) is not None:
            given.expect(recorder.names)
        return given

    def tally(
        self, objective: BoundObjective | None, probe: Callable[[BoundObjective], tuple[str, ...]] | None
    ) -> ObjectiveAccumulator | None:
        """Return the tally of an objective for one step; try the objective first if it is new. Collective then."""
        if objective is None:
            return None
        names = next((names for known, names in self._known if known is objective), None)
        if names is None:
            world = self._mesh.world
            own = world.together(lambda: probe(objective) if probe is not None else None)
            every: list[tuple[str, ...] | None] = [None] * world.size
            dist.all_gather_object(every, own, group=world.group)
            found = {each for each in every if each is not None}
            if len(found) != 1:
                raise ConfigError(f"the {objective.name} returns other sums on different ranks: {sorted(found)}.")
            names = found.pop()
            self._known = [*self._known[1 - _MAX_KNOWN_OBJECTIVES :], (objective, names)]
        return ObjectiveAccumulator(objective, names, self._mesh.device)

    # -- the end of a step

    def trained(
        self,
        reports: Sequence[GradientReport],
        shared_report: GradientReport | None,
        accumulator: ObjectiveAccumulator | None,
    ) -> StepReduction:
        """Return the end of a step, to be added up, with the findings of its parts; see `StepReduction`."""
        self._ending = StepReduction([*reports, *self._found(accumulator)], shared_report)
        return self._ending

    def evaluated(self, accumulator: ObjectiveAccumulator | None) -> StepReduction:
        return StepReduction([replace(each, void=None) for each in self._found(accumulator)])

    def loss(self, total: Tensor, accumulator: ObjectiveAccumulator | None, reduction: StepReduction) -> Tensor:
        """Return the loss, scalar, and keep the further sums; `total` is added up over all ranks."""
        self.last_sums = {} if accumulator is None else dict(zip(accumulator.names, total[1:].unbind(), strict=True))
        if reduction is not self._ending:
            reduction.settle(self._mesh.world)
        return total[0]

    def read(self, *values: Tensor) -> list[float]:
        return self._ending.settle(self._mesh.world, values)

    def settle(self) -> None:
        """Settle the last step before anything is made of it."""
        self._ending.settle(self._mesh.world)

    def _found(self, accumulator: ObjectiveAccumulator | None) -> list[GradientReport]:
        if accumulator is None:
            return []
        is_wrong = accumulator.is_wrong | (accumulator.defect is not None)

        def error(values: Sequence[float]) -> MeshwrightError | None:
            return accumulator.error(bool(values[0]))

        def drop() -> None:
            for parameter in self._trainable():
                parameter.grad = None

        return [GradientReport(is_wrong=is_wrong, values=is_wrong.double()[None], error=error, void=drop)]

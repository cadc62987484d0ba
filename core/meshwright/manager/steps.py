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
from ..step.objective import OF_MODEL, Given, Tally
from ..step.tokens import Recorder
from .gradients import Ending, Findings


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


_KEPT = 8
"""Number of recent objectives that are not tried again."""


class Steps:
    """The steps of one manager; `trainable` yields what it trains on this rank."""

    def __init__(self, mesh: Mesh, trainable: Callable[[], Iterable[nn.Parameter]]) -> None:
        self._mesh, self._trainable, self._ending = mesh, trainable, Ending()
        self._known: list[tuple[Given, tuple[str, ...]]] = []
        self.last_sums: Mapping[str, Tensor] = {}

    # -- objectives

    def given(self, objective: Objective | None, taken: frozenset[str]) -> Given | None:
        if objective is None:
            return None
        new = Given(objective, taken | OF_MODEL)
        return next((known for known, _ in self._known if known == new), new)

    def noting(self, recorder: Recorder, taken: frozenset[str]) -> Given | None:
        """Return the `Given` of a recorder, which asks for the statistics it records and no others."""
        if (given := self.given(recorder, taken)) is not None:
            given.expect(recorder.names)
        return given

    def tally(self, given: Given | None, find: Callable[[Given], tuple[str, ...]] | None) -> Tally | None:
        """Return the tally of an objective for one step; try the objective first if it is new. Collective then."""
        if given is None:
            return None
        names = next((names for known, names in self._known if known is given), None)
        if names is None:
            world = self._mesh.world
            own = world.together(lambda: find(given) if find is not None else None)
            every: list[tuple[str, ...] | None] = [None] * world.size
            dist.all_gather_object(every, own, group=world.group)
            found = {each for each in every if each is not None}
            if len(found) != 1:
                raise ConfigError(f"the {given.name} returns other sums on different ranks: {sorted(found)}.")
            names = found.pop()
            self._known = [*self._known[1 - _KEPT :], (given, names)]
        return Tally(given, names, self._mesh.device)

    # -- the end of a step

    def trained(self, parts: Sequence[Findings], shared: Findings | None, tally: Tally | None) -> Ending:
        """Return the end of a step, to be added up, with the findings of its parts; see `Ending`."""
        self._ending = Ending([*parts, *self._found(tally)], shared)
        return self._ending

    def evaluated(self, tally: Tally | None) -> Ending:
        return Ending([replace(each, void=None) for each in self._found(tally)])

    def loss(self, total: Tensor, tally: Tally | None, ending: Ending) -> Tensor:
        """Return the loss, scalar, and keep the further sums; `total` is added up over all ranks."""
        self.last_sums = {} if tally is None else dict(zip(tally.names, total[1:].unbind(), strict=True))
        if ending is not self._ending:
            ending.settle(self._mesh.world)
        return total[0]

    def read(self, *values: Tensor) -> list[float]:
        return self._ending.settle(self._mesh.world, values)

    def settle(self) -> None:
        """Settle the last step before anything is made of it."""
        self._ending.settle(self._mesh.world)

    def _found(self, tally: Tally | None) -> list[Findings]:
        if tally is None:
            return []
        is_wrong = tally.is_wrong | (tally.defect is not None)

        def error(values: Sequence[float]) -> MeshwrightError | None:
            return tally.error(bool(values[0]))

        def drop() -> None:
            for parameter in self._trainable():
                parameter.grad = None

        return [Findings(is_wrong=is_wrong, values=is_wrong.double()[None], error=error, void=drop)]

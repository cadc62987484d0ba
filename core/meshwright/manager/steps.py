"""What a manager keeps of its steps: how the last one has ended, and the objectives it was given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch.distributed as dist
from torch import Tensor, nn

from ..base.errors import ConfigError
from ..base.types import Objective
from ..mesh.mesh import Mesh
from ..step.objective import OF_MODEL, Given, Tally
from ..step.tokens import Recorder
from .ending import Ending, Findings

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
        """Return the `Given` of an objective; `taken` are the arguments of the model's forward."""
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
        """Return the tally of an objective for one step; try the objective first if it is new. Collective then.

        Args:
            find: tries the objective and returns the names of its further sums; None on ranks that cannot. A
                MeshwrightError is raised on all ranks.
        """
        if given is None:
            return None
        names = next((names for known, names in self._known if known is given), None)
        if names is None:
            names = self._agreed_names(given, find)
            self._known = [*self._known[1 - _KEPT :], (given, names)]
        return Tally(given, names, self._mesh.device)

    def _agreed_names(self, given: Given, find: Callable[[Given], tuple[str, ...]] | None) -> tuple[str, ...]:
        world = self._mesh.world
        found = world.together(lambda: find(given) if find is not None else None)
        told: list[tuple[str, ...] | None] = [None] * world.size
        dist.all_gather_object(told, found, group=world.group)
        names = {each for each in told if each is not None}
        if len(names) != 1:
            raise ConfigError(f"the {given.name} returns other sums on different ranks: {sorted(names)}.")
        return names.pop()

    # -- the end of a step

    def trained(self, parts: Sequence[Findings], shared: Findings | None, tally: Tally | None) -> Ending:
        """Return the end of a step, to be added up, with the findings of its parts; see `Ending`."""
        self._ending = Ending([*parts, *self._found(tally)], shared)
        return self._ending

    def evaluated(self, tally: Tally | None) -> Ending:
        """Return the end of an evaluation; a step may still wait for its own."""
        return Ending([replace(each, void=None) for each in self._found(tally)])

    def loss(self, total: Tensor, tally: Tally | None, ending: Ending) -> Tensor:
        """Return the loss, scalar, and keep the further sums; `total` is added up over all ranks."""
        self.last_sums = {} if tally is None else dict(zip(tally.names, total[1:].unbind(), strict=True))
        if ending is not self._ending:
            ending.settle(self._mesh.world)
        return total[0]

    def read(self, *values: Tensor) -> list[float]:
        """Read scalars, and settle the last step; see `StrategyManager.read`."""
        return self._ending.settle(self._mesh.world, values)

    def settle(self) -> None:
        """Settle the last step before anything is made of it."""
        self._ending.settle(self._mesh.world)

    def _found(self, tally: Tally | None) -> list[Findings]:
        if tally is None:
            return []
        is_wrong = tally.is_wrong | (tally.defect is not None)
        return [
            Findings(
                is_wrong=is_wrong,
                values=is_wrong.double()[None],
                error=lambda told: tally.error(bool(told[0])),
                void=self._drop,
            )
        ]

    def _drop(self) -> None:
        for parameter in self._trainable():
            parameter.grad = None

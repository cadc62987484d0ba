"""What a manager keeps of its steps: how the last one has ended, and the objectives that it has been given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch.distributed as dist
from torch import Tensor, nn

from ..base.errors import ConfigError, MeshwrightError
from ..mesh.mesh import Mesh
from ..step.objective import OF_MODEL, Given, Tally
from ..step.recorder import Recorder
from ..strategy.contract import Objective
from .ending import Ending, Findings

_KEPT = 8
"""Objectives that are known, so that they are not tried again: those of the last steps."""


class Steps:
    """The steps of one manager.

    Args:
        mesh: of its ranks.
        trainable: what it trains on this rank.

    Attributes:
        last_sums: see `StrategyManager.last_sums`.
    """

    def __init__(self, mesh: Mesh, trainable: Callable[[], Iterable[nn.Parameter]]) -> None:
        self._mesh, self._trainable, self._ending = mesh, trainable, Ending()
        self._known: list[tuple[Given, tuple[str, ...]]] = []
        self.last_sums: Mapping[str, Tensor] = {}

    # -- objectives

    def given(self, objective: Objective | None, taken: frozenset[str]) -> Given | None:
        """An objective as it was given.

        Args:
            taken: what the model's forward takes.
        """
        return None if objective is None else self._found_or_new(objective, taken)

    def noting(self, recorder: Recorder, taken: frozenset[str]) -> Given:
        """A recorder as an objective, which asks for what it is to note alone."""
        given = self._found_or_new(recorder, taken)
        given.expect(recorder.names)
        return given

    def _found_or_new(self, objective: Objective, taken: frozenset[str]) -> Given:
        new = Given(objective, taken | OF_MODEL)
        return next((known for known, _ in self._known if known == new), new)

    def tally(self, given: Given | None, find: Callable[[Given], tuple[str, ...]] | None) -> Tally | None:
        """An objective for one step, tried if it is not known yet. Collective then.

        Args:
            find: tries it, and gives the names of its further sums; None on ranks that cannot.

        Raises:
            MeshwrightError: it is refused; on all ranks.
        """
        if given is None:
            return None
        names = next((names for known, names in self._known if known is given), None)
        if names is None:
            names = self._agreed_names(given, find)
            self._known = [*self._known[1 - _KEPT :], (given, names)]
        return Tally(given, names, self._mesh.device)

    def _agreed_names(self, given: Given, find: Callable[[Given], tuple[str, ...]] | None) -> tuple[str, ...]:
        error: MeshwrightError | None = None
        found: tuple[str, ...] | None = None
        try:
            found = find(given) if find is not None else None
        except MeshwrightError as caught:
            error = caught
        world = self._mesh.world
        world.raise_together(error)
        told: list[tuple[str, ...] | None] = [None] * world.size
        dist.all_gather_object(told, found, group=world.group)
        names = {each for each in told if each is not None}
        if len(names) != 1:
            raise ConfigError(f"the {given.name} returns other sums on different ranks: {sorted(names)}.")
        return names.pop()

    # -- the end of a step

    def trained(self, parts: Sequence[Findings], shared: Findings | None, tally: Tally | None) -> Ending:
        """The end of a step, to be added up, with what its parts have found; see `Ending`."""
        self._ending = Ending([*parts, *self._found(tally)], shared)
        return self._ending

    def evaluated(self, tally: Tally | None) -> Ending:
        """The end of an evaluation, to be added up. A step may still be waiting for its own."""
        return Ending([replace(each, void=None) for each in self._found(tally)])

    def loss(self, total: Tensor, tally: Tally | None, ending: Ending) -> Tensor:
        """The loss, scalar, from what all ranks have added up: the loss and the further sums."""
        self.last_sums = {} if tally is None else dict(zip(tally.names, total[1:].unbind(), strict=True))
        if ending is not self._ending:
            ending.settle(self._mesh.world)
        return total[0]

    def read(self, *values: Tensor) -> list[float]:
        """See `StrategyManager.read`."""
        return self._ending.settle(self._mesh.world, values)

    def settle(self) -> None:
        """Called before anything is made of the last step."""
        self._ending.settle(self._mesh.world)

    def _found(self, tally: Tally | None) -> list[Findings]:
        """What an objective has come to on this rank."""
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

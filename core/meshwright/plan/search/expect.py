"""What is expected of all candidates: how long a step takes, and whether it fits.

[Note: pipelines] How long ranks wait, and how many microbatches they hold, a schedule tells itself, from few of them:
for more, ranks wait no longer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ...base.errors import MeshwrightError
from . import estimate
from .candidates import Candidate, Space
from .estimate import Estimate
from .glance import Glance

Outlook = tuple[float, float]
"""The least share of time that ranks wait, and the least part of a microbatch's activations that one of them holds, of
all schedules."""

LEAST = 0.05
"""The part of a peak that is neither held between steps nor activations, at least."""


class Outlooks:
    """Of pipelines; see [Note: pipelines]."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._told: dict[tuple[int, int], Outlook | str] = {}

    def of(self, candidate: Candidate) -> Outlook | None:
        """None: all schedules refuse it, which is counted."""
        ranks, count = candidate.degrees.pp, candidate.microbatches
        if ranks == 1:
            return 0.0, 1.0
        few = min(count, 2 * ranks)
        if (ranks, few) not in self._told:
            self._told[ranks, few] = self._ask(replace(candidate, rows=1, microbatches=few))
        told = self._told[ranks, few]
        if isinstance(told, str):
            self._space.refuse(told)
            return None
        waiting, live = told
        idle = few * waiting / (1 - waiting)
        return idle / (idle + count), live / ranks

    def _ask(self, candidate: Candidate) -> Outlook | str:
        found, reason = [], ""
        for each in self._space.wrapped(candidate):
            try:
                found.append(self._space.forecast(each, 0.0))
            except MeshwrightError as error:
                reason = str(error)
        if not found:
            return reason
        waiting, live = zip(*found, strict=True)
        return min(waiting), min(live)


@dataclass
class Expectations:
    """Of candidates, by those that are traced.

    Attributes:
        surprises: how far seconds of what was then traced were off, as logarithms.
    """

    space: Space
    candidates: Sequence[Candidate]
    outlooks: Sequence[Outlook]
    surprises: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        waiting, live = torch.tensor(self.outlooks, dtype=torch.float64).T
        work, state = estimate.of_work(self.candidates), estimate.of_state(self.candidates)
        nothing = torch.zeros_like(live)
        self._seconds = Estimate(estimate.SECONDS, work, -(1 - waiting).log())
        self._held = Estimate(estimate.HELD, state, nothing)
        self._activations = Estimate(estimate.ACTIVATIONS, work, live.log())
        self._rest = Estimate(estimate.REST, work, nothing)
        self._scale = math.log(int(self.space.values["batch_size"]) * self.space.length / self.space.world)

    def seconds(self, pending: Iterable[int]) -> tuple[Tensor, Tensor]:
        """Of a step: logarithms of what is expected, and their standard deviations.

        Args:
            pending: numbers of candidates, taken to be as is expected.
        """
        mean, deviation = self._seconds.all_as_expected(pending)
        return mean + self._scale, deviation

    def chance(self) -> Tensor:
        """How likely each candidate fits."""
        told = [each.all() for each in (self._held, self._activations, self._rest)]
        parts = [mean.exp() for mean, _ in told]
        parts[0] *= self.space.size.parameters
        size, device = sum(parts), self.space.device
        spread = sum(part * deviation for part, (_, deviation) in zip(parts, told, strict=True)) / size
        room = torch.tensor(device.memory_bytes - device.context_bytes, dtype=torch.float64)
        return torch.special.ndtr((room.log() - size.log()) / spread.clamp_min(1e-3))

    def learn_seconds(self, number: int, seconds: float) -> None:
        told = math.log(seconds) - self._scale
        if self._seconds.known:
            self.surprises.append(told - float(self._seconds.all()[0][number]))
        self._seconds.learn(number, told)

    def learn_bytes(self, number: int, glance: Glance, size: float) -> None:
        """Take what is held of so many bytes for what."""
        layers = self.space.layers / self.candidates[number].degrees.pp
        held, activations = glance.held.at(layers), glance.activations.at(layers)
        # Where activations are most need not be the peak.
        rest = max(LEAST * size, size - held - activations)
        parts = (self._held, held / self.space.size.parameters), (self._activations, activations), (self._rest, rest)
        for each, value in parts:
            each.learn(number, math.log(value))

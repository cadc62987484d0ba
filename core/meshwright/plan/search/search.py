"""Find the fastest layouts that fit, tracing as few as possible.

[Note: the search] Of all candidates the seconds and bytes are estimated (`estimate`). The one that could be the fastest, one
standard deviation below what is expected, is traced on few blocks (`glance`): that tells its numbers nearly, and those of
all that it is alike to a little. Then all are estimated anew, until no other could be among the best, or the time is up.
Those that could not fit, one deviation below what is expected, are left out; how wrong estimates were is told. Of a
pipeline the model on one stage is traced, with which each of its schedules is told. The best are then planned, the first
before others, as time allows. This is Bayesian optimisation by a lower confidence bound (N. Srinivas et al., Gaussian
Process Optimization in the Bandit Setting, 2010), on a linear model.

[Note: what is too costly] A plan of more than `AFFORDABLE` blocks times microbatches is not made: its numbers stay as they
are nearly.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ...base.errors import MeshwrightError
from ..planned import fits
from . import estimate
from .candidates import Candidate, Space, assigned, sizes_of
from .estimate import Estimate
from .glance import Glance, Refusal, Request, answer

AFFORDABLE = 120
"""Blocks times microbatches; see [Note: what is too costly]."""
FEW_BLOCKS = 54
"""That a plan without a pipeline traces of a deep model."""
CHANCE = 0.02
"""Who fits less likely is left out."""
UNLIKELY = 0.5
"""What a candidate's seconds are multiplied by, to this power, for one that fits e times less likely."""
LOOKING = 0.65
"""The part of the time in which layouts are looked for; the rest is for whole plans of the best."""


@dataclass(frozen=True)
class Found:
    """A layout whose step is known, at least nearly.

    Attributes:
        plan: of `plan`, or the few values that a glance tells.
    """

    candidate: Candidate
    plan: Mapping[str, Any]

    @property
    def is_planned(self) -> bool:
        return "ranks" in self.plan

    @property
    def seconds(self) -> float:
        return float(self.plan["step_seconds"])


@dataclass
class Search:
    """See [Note: the search].

    Attributes:
        executor: answers requests.
        workers: requests at once.
        wanted: layouts.
        limit_s: after so many seconds nothing new is looked at.
        surprises: how far estimates of seconds were off, as logarithms, of what was then traced.
    """

    space: Space
    executor: Executor
    workers: int
    wanted: int
    limit_s: float
    expert_imbalance: float = 1.0
    candidates: list[Candidate] = field(default_factory=list)
    found: list[Found] = field(default_factory=list)
    too_large: int = 0
    nearest: tuple[float, Candidate | None] = (float("inf"), None)
    traced: int = 0
    planned: int = 0
    surprises: list[float] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)
    _outlooks: dict[tuple[int, int], tuple[float, float] | str] = field(default_factory=dict)
    _seeds: list[int] = field(default_factory=list)
    _glances: dict[tuple[Any, ...], Glance | Refusal] = field(default_factory=dict)
    _done: set[int] = field(default_factory=set)
    _alike: dict[tuple[Any, ...], list[int]] = field(default_factory=dict)

    def run(self) -> None:
        """Until no other could be among the best, or time is up."""
        possible = [each for each in self.space.candidates() if self._fits(each, self.space.least(each))]
        outlooks = [self._outlook(each) for each in possible]
        self.candidates = [each for each, outlook in zip(possible, outlooks, strict=True) if outlook is not None]
        if not self.candidates:
            return
        told = torch.tensor([each for each in outlooks if each is not None], dtype=torch.float64)
        waiting, live = told.T
        for number, each in enumerate(self.candidates):
            for key in _refusal_keys(each):
                self._alike.setdefault(key, []).append(number)
        work, state = estimate.of_work(self.candidates), estimate.of_state(self.candidates)
        self._seconds = Estimate(estimate.SECONDS, work, -(1 - waiting).log())
        self._bytes = (
            Estimate(estimate.HELD, state, torch.zeros_like(live)),
            Estimate(estimate.ACTIVATIONS, work, live.log()),
            Estimate(estimate.REST, work, torch.zeros_like(live)),
        )
        self._seeds = self._begin()
        pending: dict[Future[Any], int] = {}
        while True:
            while len(pending) < self.workers and (number := self._next(pending.values())) is not None:
                request = self._request(self._alone(self.candidates[number]))
                pending[self.executor.submit(answer, request)] = number
            if not pending:
                break
            for done in wait(pending, return_when=FIRST_COMPLETED).done:
                self._learn(pending.pop(done), done.result())

    def settle(self) -> None:
        """Plan the best in their order, as time allows, but the first in any case; who does not fit is lost."""
        pending: dict[Future[Any], Found] = {}
        while True:
            waiting = {each.candidate.key for each in pending.values()}
            for number, each in enumerate(self.best()):
                is_open = not each.is_planned and each.candidate.key not in waiting and self._is_affordable(each.candidate)
                if is_open and len(pending) < self.workers and (number == 0 or self.elapsed < self.limit_s):
                    pending[self.executor.submit(answer, self._request(each.candidate, is_whole=True))] = each
            if not pending:
                return
            for done in wait(pending, return_when=FIRST_COMPLETED).done:
                each, result = pending.pop(done), done.result()
                self.planned += 1
                self.found.remove(each)
                if isinstance(result, Refusal):
                    self.space.refuse(result.reason)
                elif self._fits(each.candidate, result["peak_reserved_bytes"]):
                    self.found.append(Found(each.candidate, result))

    def best(self) -> list[Found]:
        """The fastest of those found."""
        return self.ranked()[: self.wanted]

    def ranked(self) -> list[Found]:
        """Those found, the fastest first."""
        return sorted(self.found, key=lambda each: each.seconds)

    def open(self) -> list[tuple[float, Candidate]]:
        """Those that could be among the best for all that is known, with the seconds that are expected of them, the
        fastest first."""
        if not self.candidates:
            return []
        least, expected = self._bounds({})
        found = (least < math.log(self.worst)).nonzero().flatten().tolist()
        rows = [(math.exp(expected[number]), number) for number in found]
        return [(seconds, self.candidates[number]) for seconds, number in sorted(rows)]

    @property
    def worst(self) -> float:
        """The seconds of the last of the best; infinite while there are too few."""
        best = self.best()
        return best[-1].seconds if len(best) == self.wanted else float("inf")

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.started

    def left_out(self) -> int:
        """How many have not been traced, as they are expected not to fit."""
        return int((self._open & (self._chance() <= CHANCE)).sum()) if self.candidates else 0

    def left(self) -> int:
        """How many have not been traced that could fit."""
        return int((self._open & (self._chance() > CHANCE)).sum()) if self.candidates else 0

    def _next(self, pending: Iterable[int]) -> int | None:
        """Whom to trace next; of pipelines whose model has been traced, all that follows is told at once."""
        if self._seeds:
            return self._seeds.pop(0)
        while self.elapsed < LOOKING * self.limit_s:
            busy = {number: 0.0 for number in pending}
            least, expected = self._bounds({number: float("nan") for number in busy})
            for number in busy:
                least[number] = math.inf
            number = int(least.argmin())
            if not least[number] < math.log(self.worst):
                return None
            known = self._glances.get(_work(self._alone(self.candidates[number])))
            if known is None:
                return number
            self._learn(number, known)
        return None

    def _outlook(self, candidate: Candidate) -> tuple[float, float] | None:
        """The least share of time that ranks of a pipeline wait, and the least share of activations of a microbatch that
        one of them holds, of all schedules, as far as some microbatches tell; None: all refuse it."""
        ranks, count = candidate.degrees.pp, candidate.microbatches
        if ranks == 1:
            return 0.0, 1.0
        few = min(count, 2 * ranks)
        if (ranks, few) not in self._outlooks:
            self._outlooks[ranks, few] = self._told_of(replace(candidate, rows=1, microbatches=few))
        told = self._outlooks[ranks, few]
        if isinstance(told, str):
            self.space.refuse(told)
            return None
        waiting, live = told
        idle = few * waiting / (1 - waiting)
        return idle / (idle + count), live / ranks

    def _told_of(self, candidate: Candidate) -> tuple[float, float] | str:
        """Of all schedules the least of both, or why there is none."""
        found, reason = [], ""
        for each in self.space.wrapped(candidate):
            try:
                found.append(self.space.forecast(each, 0.0))
            except MeshwrightError as error:
                reason = str(error)
        waiting, live = zip(*found, strict=True) if found else ((), ())
        return (min(waiting), min(live)) if found else reason

    def _begin(self) -> list[int]:
        """With whom to begin: of the first strategy, with all that there is of recomputation, divided over tp least and
        most."""
        alone = [each for each in self.candidates if each.degrees.pp == 1] or self.candidates
        sizes = {each.degrees.tp for each in alone}
        found: dict[tuple[Any, ...], int] = {}
        for number, each in enumerate(self.candidates):
            if each.family == alone[0].family and each.degrees.pp == alone[0].degrees.pp:
                if each.rows == alone[0].rows and each.degrees.tp in (min(sizes), max(sizes)):
                    found.setdefault((each.degrees.tp, each.recomputation), number)
        return list(found.values())

    @property
    def _open(self) -> Tensor:
        found = torch.ones(len(self.candidates), dtype=torch.bool)
        found[list(self._done)] = False
        return found

    def _bounds(self, pending: Mapping[int, float]) -> tuple[Tensor, Tensor]:
        """Logarithms of the least seconds of a step, and of those that are expected; infinite for who is done, or could
        not fit.

        Args:
            pending: taken to be as is expected.
        """
        mean, deviation = self._seconds.all()
        if pending:
            mean, deviation = self._seconds.all({number: float(mean[number]) for number in pending})
        tokens = int(self.space.values["batch_size"]) * self.space.length
        expected = mean + math.log(tokens / self.space.world)
        least = expected - deviation
        chance = self._chance()
        could = self._open & (chance > CHANCE)
        return torch.where(could, least - UNLIKELY * chance.clamp_min(CHANCE).log(), math.inf), expected

    def _chance(self) -> Tensor:
        """How likely each candidate fits."""
        told = [each.all() for each in self._bytes]
        parts = [mean.exp() for mean, _ in told]
        parts[0] *= self.space.size.parameters
        size, device = sum(parts), self.space.device
        spread = sum(part * deviation for part, (_, deviation) in zip(parts, told, strict=True)) / size
        room = torch.tensor(device.memory_bytes - device.context_bytes, dtype=torch.float64)
        return torch.special.ndtr((room.log() - size.log()) / spread.clamp_min(1e-3))

    def _learn(self, number: int, result: Glance | Refusal) -> None:
        """Take what a candidate's trace has told."""
        candidate = self.candidates[number]
        alone = self._alone(candidate)
        if _work(alone) not in self._glances:
            self.traced += 1
            self._glances[_work(alone)] = result
        if isinstance(result, Refusal):
            self._refuse(candidate, result)
            self._refuse(alone, result)
            return
        self._done.add(number)
        seconds, size = self._told(candidate, result) if candidate.degrees.pp == 1 else self._schedules(candidate, result)
        if math.isfinite(size):
            self._learn_bytes(number, result, size)
        if math.isfinite(seconds):
            tokens = int(self.space.values["batch_size"]) * self.space.length
            told = math.log(seconds * self.space.world / tokens)
            if self._seconds.known:
                self.surprises.append(told - float(self._seconds.all()[0][number]))
            self._seconds.known[number] = told

    def _learn_bytes(self, number: int, found: Glance, size: float) -> None:
        """Take what is held of so many bytes for what."""
        layers = self.space.layers / self.candidates[number].degrees.pp
        held, activations = found.held.at(layers), found.activations.at(layers)
        values = (held / self.space.size.parameters, activations, size - held - activations)
        for each, value in zip(self._bytes, values, strict=True):
            each.known[number] = math.log(max(1e-3, value))

    def _told(self, candidate: Candidate, glance: Glance) -> tuple[float, float]:
        """What a glance tells of a candidate without a pipeline."""
        layers = self.space.layers
        seconds, size = glance.seconds(layers, candidate.microbatches), glance.reserved(layers)
        self._keep(candidate, seconds, size)
        return seconds, size

    def _schedules(self, candidate: Candidate, glance: Glance) -> tuple[float, float]:
        """What a glance at the model on one stage tells of a pipeline under each schedule; the least seconds."""
        ranks, layers, count = candidate.degrees.pp, self.space.layers, candidate.microbatches
        best = (math.inf, math.inf)
        for each in self.space.wrapped(candidate):
            try:
                waiting, live = self.space.forecast(each, glance.head)
            except MeshwrightError as error:
                self.space.refuse(str(error))
                continue
            seconds, size = glance.piped_seconds(layers, count, ranks, waiting), glance.piped_reserved(layers, ranks, live)
            self._keep(each, seconds, size)
            best = min(best, (seconds, size))
        return best

    def _keep(self, candidate: Candidate, seconds: float, size: float) -> None:
        if not self._fits(candidate, size):
            return
        tokens = int(self.space.values["batch_size"]) * self.space.length
        told = {
            "strategy": str(self.space.stack(candidate)),
            "mesh": str(candidate.degrees),
            "step_seconds": seconds,
            "tokens_per_second_per_device": tokens / seconds / self.space.world,
            "peak_reserved_bytes": round(size),
        }
        self.found.append(Found(candidate, told))

    def _refuse(self, candidate: Candidate, refusal: Refusal) -> None:
        """Nor those that are refused for the same: whatever their batch, unless that was the reason."""
        alike = [*self._alike.get(_refusal_keys(candidate)[refusal.of_batch], ())]
        new = set(alike) - self._done
        self.space.refuse(refusal.reason, len(new))
        self._done |= new

    def _fits(self, candidate: Candidate, size: float) -> bool:
        if fits(int(size), self.space.device):
            return True
        self.too_large += 1
        if size < self.nearest[0]:
            self.nearest = (size, candidate)
        return False

    def _is_affordable(self, candidate: Candidate) -> bool:
        """See [Note: what is too costly]."""
        layers = self.space.layers
        return candidate.microbatches * (layers if candidate.degrees.pp > 1 else min(layers, FEW_BLOCKS)) <= AFFORDABLE

    def _alone(self, candidate: Candidate) -> Candidate:
        """The same model on one stage, on as many ranks as a stage has, with the microbatches of a glance."""
        count = min(2, candidate.microbatches)
        if candidate.degrees.pp == 1:
            return replace(candidate, microbatches=count)
        alone = replace(candidate.degrees, pp=1)
        sizes = sizes_of(alone).model_dump()
        values = {key: sizes.get(key, value) for key, value in candidate.values.items()}
        values |= {"wrapper_config": {}}
        return replace(candidate, degrees=alone, microbatches=count, values=values, wrapper=None, schedule="")

    def _request(self, asked: Candidate, *, is_whole: bool = False) -> Request:
        values = assigned(self.space.values, asked.values.items())
        values["batch_size"] = asked.degrees.dp * asked.rows * asked.microbatches
        return Request(values, asked.degrees.world_size, self.space.device, self.expert_imbalance, is_whole)


def _work(candidate: Candidate) -> tuple[Any, ...]:
    """Candidates that compute the same in a step."""
    return (candidate.family, candidate.recomputation, candidate.rows, candidate.degrees, candidate.microbatches)


def _refusal_keys(candidate: Candidate) -> list[tuple[Any, ...]]:
    degrees = candidate.degrees
    are_above_one = (degrees.pp > 1, degrees.dp_replicate > 1, degrees.dp_shard > 1)
    alike = (candidate.family, degrees.tp, degrees.cp, degrees.ep, *are_above_one)
    return [alike, (*alike, candidate.recomputation, candidate.rows, degrees, candidate.schedule)]

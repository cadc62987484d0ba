"""Find the fastest layouts that fit, tracing as few as possible.

[Note: the search] Of all candidates the seconds and bytes are expected (`expect`). The one that could be the fastest,
one standard deviation below what is expected, is traced on few blocks (`glance`): that tells its numbers nearly, and
of those that are alike a little. So on, until no other could be among the best, or the time is up. Who is unlikely to
fit comes later, or is left out; how far expectations were off is told. Of a pipeline the model is traced on one
stage, which tells of each of its schedules. The best are then planned, the first before others, as time allows. This
is Bayesian optimization by a lower confidence bound (N. Srinivas et al., Gaussian Process Optimization in the Bandit
Setting, 2010), on a linear model.

[Note: what is too costly] A pipeline of more than `AFFORDABLE` blocks times microbatches is not planned: its numbers
stay as a glance tells them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ...base.errors import MeshwrightError
from ..planned import fits
from .candidates import Candidate, Space, assigned, sizes_of
from .expect import Expectations, Outlooks
from .glance import Glance, Refusal, Request, answer

AFFORDABLE = 120
"""Blocks times microbatches; see [Note: what is too costly]."""
CHANCE = 0.02
"""Who fits less likely is left out."""
UNLIKELY = 1.0
"""What a candidate's seconds are multiplied by, to this power, for one that fits e times less likely."""
LOOKING = 0.7
"""The part of the time in which layouts are looked for; the rest is for whole plans of the best."""
WAITING = 0.1
"""The part in which those are waited for that are traced when it is over."""


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
        found, crowded: what has been told, of those that fit and of those that do not.
    """

    space: Space
    executor: Executor
    workers: int
    wanted: int
    limit_s: float
    expert_imbalance: float = 1.0
    candidates: list[Candidate] = field(default_factory=list)
    found: list[Found] = field(default_factory=list)
    crowded: list[Found] = field(default_factory=list)
    too_large: int = 0
    nearest: tuple[float, Candidate | None] = (float("inf"), None)
    traced: int = 0
    planned: int = 0
    started: float = field(default_factory=time.monotonic)
    _seeds: list[int] = field(default_factory=list)
    _glances: dict[tuple[Any, ...], Glance | Refusal] = field(default_factory=dict)
    _done: set[int] = field(default_factory=set)
    _alike: dict[tuple[Any, ...], list[int]] = field(default_factory=dict)

    def run(self) -> None:
        """Until no other could be among the best, or time is up."""
        possible = [each for each in self.space.candidates() if self._fits(each, self.space.least(each))]
        outlooks = Outlooks(self.space)
        found = [(each, told) for each in possible if (told := outlooks.of(each)) is not None]
        if not found:
            return
        self.candidates = [each for each, _ in found]
        for at, each in enumerate(self.candidates):
            for key in _refusal_keys(each):
                self._alike.setdefault(key, []).append(at)
        self._expected = Expectations(self.space, self.candidates, [told for _, told in found])
        self._seeds = _seeds(self.candidates)
        pending: dict[Future[Any], int] = {}
        while True:
            while len(pending) < self.workers and (number := self._next(pending.values())) is not None:
                request = self._request(self._alone(self.candidates[number]))
                pending[self.executor.submit(answer, request)] = number
            left = (LOOKING + WAITING) * self.limit_s - self.elapsed
            ended = wait(pending, timeout=max(0.0, left), return_when=FIRST_COMPLETED).done
            for done in ended:
                self._learn(pending.pop(done), done.result())
            if not ended:
                return

    def settle(self) -> None:
        """Plan the best in their order, as time allows, but the first in any case; who does not fit is lost."""
        pending: dict[Future[Any], Found] = {}
        begun, longest = {}, 0.0
        while True:
            waiting = {each.candidate.key for each in pending.values()}
            for number, each in enumerate(self.best()):
                is_open = (
                    not each.is_planned and each.candidate.key not in waiting and self._is_affordable(each.candidate)
                )
                has_time = number == 0 or self.elapsed + longest < self.limit_s
                if is_open and has_time and len(pending) < self.workers:
                    future = self.executor.submit(answer, self._request(each.candidate, is_whole=True))
                    pending[future], begun[future] = each, self.elapsed
            if not pending:
                return
            for done in wait(pending, return_when=FIRST_COMPLETED).done:
                each, result = pending.pop(done), done.result()
                longest = max(longest, self.elapsed - begun[done])
                self.planned += 1
                self.found.remove(each)
                if isinstance(result, Refusal):
                    self.space.refuse(result.reason)
                else:
                    fits_ = self._fits(each.candidate, result["peak_reserved_bytes"])
                    (self.found if fits_ else self.crowded).append(Found(each.candidate, result))

    def best(self) -> list[Found]:
        """The fastest of those found."""
        return self.ranked()[: self.wanted]

    def ranked(self) -> list[Found]:
        """Those found, the fastest first."""
        return sorted(self.found, key=lambda each: each.seconds)

    def open(self) -> list[tuple[float, Candidate]]:
        """Those that could be faster than the last of the best for all that is known, with the seconds that are
        expected of them; first those that would have been looked at first."""
        if not self.candidates:
            return []
        least, expected = self._bounds([])
        best = self.best()
        found = (least < math.log(best[-1].seconds if best else math.inf)).nonzero().flatten().tolist()
        found.sort(key=lambda number: float(least[number]))
        return [(math.exp(expected[number]), self.candidates[number]) for number in found]

    @property
    def worst(self) -> float:
        """The seconds of the last of the best; infinite while there are too few."""
        best = self.best()
        return best[-1].seconds if len(best) == self.wanted else float("inf")

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.started

    @property
    def deviation(self) -> float:
        """How far what was expected lay from what was then traced, as a part (root of the mean square)."""
        found = self._expected.surprises if self.candidates else []
        return math.sqrt(sum(each**2 for each in found) / max(1, len(found)))

    def left_out(self) -> int:
        """How many have not been traced, as they are expected not to fit."""
        return int((self._open & (self._expected.chance() <= CHANCE)).sum()) if self.candidates else 0

    def left(self) -> int:
        """How many have not been traced that could fit."""
        return int((self._open & (self._expected.chance() > CHANCE)).sum()) if self.candidates else 0

    def _next(self, pending: Iterable[int]) -> int | None:
        """Whom to trace next; of pipelines whose model has been traced, all that follows is told at once."""
        if self._seeds:
            return self._seeds.pop(0)
        busy = list(pending)
        while self.elapsed < LOOKING * self.limit_s:
            least, _ = self._bounds(busy)
            least[busy] = math.inf
            number = int(least.argmin())
            if not least[number] < math.log(self.worst):
                return None
            known = self._glances.get(_work(self._alone(self.candidates[number])))
            if known is None:
                return number
            self._learn(number, known)
        return None

    @property
    def _open(self) -> Tensor:
        found = torch.ones(len(self.candidates), dtype=torch.bool)
        found[list(self._done)] = False
        return found

    def _bounds(self, pending: Iterable[int]) -> tuple[Tensor, Tensor]:
        """Logarithms of the least seconds of a step, and of those that are expected; infinite for who is done, or could
        not fit.

        Args:
            pending: taken to be as is expected.
        """
        expected, deviation = self._expected.seconds(pending)
        chance = self._expected.chance()
        could = self._open & (chance > CHANCE)
        least = expected - deviation - UNLIKELY * chance.clamp_min(CHANCE).log()
        return torch.where(could, least, math.inf), expected

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
        seconds, size = (
            self._told(candidate, result) if candidate.degrees.pp == 1 else self._schedules(candidate, result)
        )
        if math.isfinite(seconds):
            self._expected.learn_bytes(number, result, size)
            self._expected.learn_seconds(number, seconds)

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
            seconds, size = (
                glance.piped_seconds(layers, count, ranks, waiting),
                glance.piped_reserved(layers, ranks, live),
            )
            self._keep(each, seconds, size)
            best = min(best, (seconds, size))
        return best

    def _keep(self, candidate: Candidate, seconds: float, size: float) -> None:
        tokens = int(self.space.values["batch_size"]) * self.space.length
        told = {
            "strategy": str(self.space.stack(candidate)),
            "mesh": str(candidate.degrees),
            "step_seconds": seconds,
            "tokens_per_second_per_device": tokens / seconds / self.space.world,
            "peak_reserved_bytes": round(size),
        }
        (self.found if self._fits(candidate, size) else self.crowded).append(Found(candidate, told))

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
        return candidate.degrees.pp == 1 or candidate.microbatches * self.space.layers <= AFFORDABLE

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


def _seeds(candidates: Sequence[Candidate]) -> list[int]:
    """With whom to begin: the first, with all that there is of recomputation; and one that tp divides most."""
    alone = [at for at, each in enumerate(candidates) if each.degrees.pp == 1] or [0]
    most, first = alone[0], candidates[alone[0]]
    found: dict[Any, int] = {}
    for at in alone:
        each = candidates[at]
        if (each.family, each.rows) == (first.family, first.rows):
            most = max(most, at, key=lambda at: candidates[at].degrees.tp)
            if each.degrees == first.degrees:
                found.setdefault(each.recomputation, at)
    return list(dict.fromkeys([most, *found.values()]))


def _work(candidate: Candidate) -> tuple[Any, ...]:
    """Candidates that compute the same in a step."""
    return (candidate.family, candidate.recomputation, candidate.rows, candidate.degrees, candidate.microbatches)


def _refusal_keys(candidate: Candidate) -> list[tuple[Any, ...]]:
    degrees = candidate.degrees
    are_above_one = (degrees.pp > 1, degrees.dp_replicate > 1, degrees.dp_shard > 1)
    alike = (candidate.family, degrees.tp, degrees.cp, degrees.ep, *are_above_one)
    return [alike, (*alike, candidate.recomputation, candidate.rows, degrees, candidate.schedule)]

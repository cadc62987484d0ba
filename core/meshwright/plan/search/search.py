"""Find the fastest layouts that fit, tracing as few as possible.

[Note: the search] Each candidate has a bound: its step takes no less. The one with the least bound is looked at next:
first at a glance (`measure.glance`), which raises its bound and that of all that compute alike, then more nearly
(`measure.near`), or of a pipeline by its whole plan. When as many are known so as are wanted, and no bound is below
them, they are the best. Then they are planned, the first before others, as time allows. Bounds, from loose to tight:

- what a device computes for its share where the model is divided less over tp and cp, or less is computed again, or, on
  a device without latencies, where microbatches are of another size: dividing further saves no work;
- what a microbatch computes, times their number; of a pipeline, divided by its ranks, with the bubbles of its schedule;
- a step of two microbatches, and the computation of the others.

Memory is bounded likewise: by the parameters, divided by all ranks that can share them, and by the peak of a glance at
a layout that shards more and divides less, in equal parts, with its activations for further sequences. Bounds take
blocks as alike, and stages as equal.

[Note: what is too costly] A plan traces all microbatches of a step. One of more than `AFFORDABLE` blocks is not made:
the numbers of `measure.near` stay, and a pipeline, which has none, is told as a layout that could be faster.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from dataclasses import dataclass, field, replace
from typing import Any

from ...base.errors import MeshwrightError
from ...strategy.registry import get_registry
from ..depth import DEPTHS
from ..planned import fits
from .bounds import Known
from .candidates import Candidate, Space, assigned, sizes_of
from .measure import Glance, Refusal, Request, answer

Entry = tuple[float, int, Candidate]
"""Of the heap: the bound when it was last known, a number that tells equal ones apart, and whose it is."""
AFFORDABLE = 120
"""Blocks times microbatches; see [Note: what is too costly]."""
FEW_BLOCKS = sum(DEPTHS[-1])
"""That a plan without a pipeline traces of a deep model."""
LOOKING = 0.65
"""The part of the time in which layouts are looked for; the rest is for whole plans of the best."""


@dataclass(frozen=True)
class Found:
    """A layout whose step is known, at least nearly.

    Attributes:
        plan: of `plan`, or the few values of `measure.near`.
    """

    candidate: Candidate
    plan: Mapping[str, Any]

    @property
    def is_planned(self) -> bool:
        return "ranks" in self.plan

    @property
    def seconds(self) -> float:
        return float(self.plan["step_seconds"])


@dataclass(frozen=True)
class _Task:
    """Something to ask of a process.

    Attributes:
        entry: of the heap, whose candidate it is for.
        asked: what is looked at; of a pipeline first the model without it.
    """

    kind: str
    entry: Entry
    asked: Candidate


@dataclass
class Search:
    """See [Note: the search].

    Attributes:
        executor: answers requests.
        workers: requests at once.
        wanted: layouts.
        limit_s: after so many seconds nothing new is looked at.
    """

    space: Space
    known: Known
    executor: Executor
    workers: int
    wanted: int
    limit_s: float
    expert_imbalance: float = 1.0
    found: list[Found] = field(default_factory=list)
    heap: list[Entry] = field(default_factory=list)
    costly: list[Entry] = field(default_factory=list)
    too_large: int = 0
    nearest: tuple[float, Candidate | None] = (float("inf"), None)
    traced: int = 0
    planned: int = 0
    started: float = field(default_factory=time.monotonic)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def run(self) -> None:
        """Until the best are certain, or time is up."""
        for candidate in self.space.candidates():
            if self._fits(candidate, self.known.held(candidate)):
                self.heap.append((0.0, next(self._numbers), candidate))
        heapq.heapify(self.heap)
        pending: dict[Future[Any], _Task] = {}
        while True:
            while len(pending) < self.workers and (task := self._next(pending.values())) is not None:
                pending[self.executor.submit(answer, self._request(task))] = task
            if not pending:
                break
            for done in wait(pending, return_when=FIRST_COMPLETED).done:
                self._take(pending.pop(done), done.result())
        self._fill_up()

    def _fill_up(self) -> None:
        """Where too few are known nearly, go on with the best of what was glanced at; one at least."""
        for entry in sorted((entry for entry in self.heap if self._is_seen(entry[2])), key=lambda entry: entry[:2]):
            enough = len(self.found) >= self.wanted or (self.found and self.elapsed > self.limit_s)
            if enough:
                return
            self.heap.remove(entry)
            if self._stays(entry):
                task = _Task("near", entry, entry[2])
                self._take(task, self.executor.submit(answer, self._request(task)).result())

    def _is_seen(self, candidate: Candidate) -> bool:
        return candidate.degrees.pp == 1 and candidate.degrees in self.known.glances.get(candidate.unit, {})

    def settle(self) -> None:
        """Plan the best in their order, as time allows, but the first in any case; who does not fit is lost."""
        pending: dict[Future[Any], _Task] = {}
        while True:
            waiting = {task.asked.key for task in pending.values()}
            for number, each in enumerate(self.best()):
                is_open = (
                    not each.is_planned and each.candidate.key not in waiting and self._is_affordable(each.candidate)
                )
                if is_open and len(pending) < self.workers and (number == 0 or self.elapsed < self.limit_s):
                    task = _Task("plan", (each.seconds, 0, each.candidate), each.candidate)
                    pending[self.executor.submit(answer, self._request(task))] = task
            if not pending:
                return
            for done in wait(pending, return_when=FIRST_COMPLETED).done:
                task = pending.pop(done)
                self.found = [each for each in self.found if each.candidate.key != task.asked.key]
                self._take(task, done.result())

    def best(self) -> list[Found]:
        """Those found, the fastest first."""
        return sorted(self.found, key=lambda each: each.seconds)[: self.wanted]

    def open(self) -> list[tuple[float, Candidate]]:
        """Those that could be among the best for all that is known, with their bounds; none: the best are certain."""
        entries = [entry for entry in self.heap if entry[0] < self.worst]
        self.heap = [entry for entry in self.heap if entry[0] >= self.worst]
        for entry in entries:
            if self._stays(entry):
                heapq.heappush(self.heap, entry)
        entries = sorted([*self.heap, *self.costly], key=lambda entry: entry[:2])
        return [(bound, candidate) for bound, _, candidate in entries if bound < self.worst]

    @property
    def worst(self) -> float:
        """The seconds of the last of the best; infinite while there are too few."""
        seconds = sorted(each.seconds for each in self.found)
        return seconds[self.wanted - 1] if len(seconds) >= self.wanted else float("inf")

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.started

    def _fits(self, candidate: Candidate, size: float) -> bool:
        if fits(int(size), self.space.device):
            return True
        self.too_large += 1
        if size < self.nearest[0]:
            self.nearest = (size, candidate)
        if candidate.degrees.pp == 1 or candidate.wrapper is not None:
            rows = self.known.too_large.get(_but_rows(candidate), candidate.rows)
            self.known.too_large[_but_rows(candidate)] = min(rows, candidate.rows)
        return False

    def _next(self, pending: Iterable[_Task]) -> _Task | None:
        """What is to be done next; what waits for another's glance comes back later."""
        busy = {_place(task.asked) for task in pending if task.kind == "glance"}
        aside: list[Entry] = []
        task = None
        while task is None and self.heap and self.heap[0][0] < self.worst and self.elapsed < LOOKING * self.limit_s:
            entry = heapq.heappop(self.heap)
            task = self._step(entry) if self._stays(entry) else None
            if task is not None and task.kind == "glance" and _place(task.asked) in busy:
                aside.append(entry)
                task = None
        for entry in aside:
            heapq.heappush(self.heap, entry)
        return task

    def _stays(self, entry: Entry) -> bool:
        """Whether a candidate's bound is as it was; others go back, or are counted as lost."""
        bound, number, candidate = entry
        known = self.known
        reason = known.refusal(candidate)
        if reason is not None:
            self.space.refuse(reason)
            return False
        if candidate.rows >= known.too_large.get(_but_rows(candidate), candidate.rows + 1):
            self.too_large += 1
            return False
        try:
            now, size = known.seconds(candidate), known.bytes(candidate)
        except MeshwrightError as error:
            self.space.refuse(str(error))
            return False
        if not self._fits(candidate, size):
            return False
        if now > bound * (1 + 1e-9):
            heapq.heappush(self.heap, (now, number, candidate))
            return False
        return True

    def _step(self, entry: Entry) -> _Task | None:
        """How to learn more of a candidate; None: it has been taken apart."""
        candidate = entry[2]
        glances = self.known.glances.get(candidate.unit, {})
        if candidate.degrees.pp == 1:
            return _Task("near" if candidate.degrees in glances else "glance", entry, candidate)
        if not glances:
            return _Task("glance", entry, self._without_pipeline(candidate))
        if candidate.wrapper is not None:
            if self._is_affordable(candidate):
                return _Task("plan", entry, candidate)
            self.costly.append(entry)
            return None
        for each in self.space.wrapped(candidate):
            heapq.heappush(self.heap, (0.0, next(self._numbers), each))
        return None

    def _is_affordable(self, candidate: Candidate) -> bool:
        """See [Note: what is too costly]."""
        layers = self.space.layers
        return candidate.microbatches * (layers if candidate.degrees.pp > 1 else min(layers, FEW_BLOCKS)) <= AFFORDABLE

    def _without_pipeline(self, candidate: Candidate) -> Candidate:
        """The same model on one stage, with more data-parallel ranks where the strategy takes such."""
        axes, degrees = get_registry().get(candidate.values["strategy"]).axes, candidate.degrees
        more = next((axis for axis in ("dp_shard", "dp_replicate") if axis in axes), None)
        alone = replace(degrees, pp=1, **({} if more is None else {more: getattr(degrees, more) * degrees.pp}))
        sizes = sizes_of(alone).model_dump()
        values = {key: sizes.get(key, value) for key, value in candidate.values.items()}
        values |= {"wrapper_config": {}}
        return replace(candidate, degrees=alone, microbatches=1, values=values, wrapper=None, schedule="")

    def _request(self, task: _Task) -> Request:
        asked = task.asked
        values = assigned(self.space.values, asked.values.items())
        if task.kind == "glance":
            values["batch_size"] = asked.degrees.dp * asked.rows * asked.glanced
        two = self.known.glances[asked.unit][asked.degrees] if task.kind == "near" else None
        return Request(values, asked.degrees.world_size, self.space.device, self.expert_imbalance, task.kind, two)

    def _take(self, task: _Task, result: Glance | dict[str, Any] | Refusal) -> None:
        """Learn from an answer; what is not settled comes back."""
        candidate = task.entry[2]
        self.traced += task.kind != "plan"
        self.planned += task.kind == "plan"
        if isinstance(result, Refusal):
            for each in (candidate, task.asked):
                self.known.refuse(each, result.reason, of_batch=result.of_batch)
            self.space.refuse(result.reason)
        elif isinstance(result, Glance):
            self.known.learn(task.asked, result)
            heapq.heappush(self.heap, task.entry)
        elif result["fits"]:
            self.found.append(Found(candidate, result))
        else:
            self._fits(candidate, result["peak_reserved_bytes"])


def _but_rows(candidate: Candidate) -> tuple[Any, ...]:
    return (candidate.family, candidate.recomputation, candidate.degrees, candidate.schedule)


def _place(candidate: Candidate) -> tuple[Any, ...]:
    """Of candidates that tell much of each other: they are not looked at together."""
    family, recomputation, _, *axes = candidate.unit
    return (family, recomputation, *axes)

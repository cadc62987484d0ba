"""Find the fastest layouts that fit, tracing as few as possible.

[Note: the search] Each iteration traces, with few blocks, the candidate with the smallest lower bound of its step time:
the expected time minus one standard deviation (see `estimation`), with a penalty if it is unlikely to fit. The result
improves the estimates of similar candidates. The search ends when no other candidate could be among the best, or when
time is up. One trace on a single stage serves all schedules of a pipeline. Then the best are planned in order, as time
allows. This is Bayesian optimization with a lower confidence bound (N. Srinivas et al., Gaussian Process Optimization
in the Bandit Setting, 2010) and a linear model.
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

from meshwright.plugin import MeshwrightError

from ..planner import fits_in_memory
from .candidates import Candidate, SearchSpace, get_mesh_sizes, set_dotted_keys
from .estimation import CandidateEstimates, QuickTrace, ScheduleEstimates, TraceRefusal, TraceRequest, handle_request

MAX_PLANNED_PIPELINE_SIZE = (
    120  # Pipelines with more blocks times microbatches are not planned; they keep the numbers of a quick trace
)
MIN_FIT_PROBABILITY = 0.02  # Candidates with a lower probability are not traced
FIT_PENALTY_EXPONENT = (
    1.0  # The time of a candidate that fits with probability p is multiplied by p to minus this power
)
TRACING_TIME_FRACTION = 0.7  # Fraction of the time limit for tracing; the rest is for full plans of the best
DRAIN_TIME_FRACTION = 0.1  # Further fraction in which to wait for pending traces


@dataclass(frozen=True)
class EvaluatedLayout:
    """A layout with the result of a plan; before it is planned, `plan` has only the values of a quick trace."""

    candidate: Candidate
    plan: Mapping[str, Any]

    @property
    def is_planned(self) -> bool:
        return "ranks" in self.plan

    @property
    def seconds(self) -> float:
        return float(self.plan["step_seconds"])


@dataclass
class LayoutSearch:
    """Search among the candidates of a space; see [Note: the search]. `time_limit_s` is for `run` and `plan_best`."""

    space: SearchSpace
    executor: Executor
    num_workers: int
    num_best: int
    time_limit_s: float
    expert_imbalance: float = 1.0
    candidates: list[Candidate] = field(default_factory=list)
    fitting: list[EvaluatedLayout] = field(default_factory=list)
    not_fitting: list[EvaluatedLayout] = field(default_factory=list)
    num_too_large: int = 0
    nearest: tuple[float, Candidate | None] = (float("inf"), None)
    num_traced: int = 0
    num_planned: int = 0
    started: float = field(default_factory=time.monotonic)
    _seeds: list[int] = field(default_factory=list)
    _quick_traces: dict[tuple[Any, ...], QuickTrace | TraceRefusal] = field(default_factory=dict)
    _done: set[int] = field(default_factory=set)
    _similar: dict[tuple[Any, ...], list[int]] = field(default_factory=dict)

    def run(self) -> None:
        """Trace candidates until no other could be among the best, or time is up."""
        possible = [each for each in self.space.iter_candidates() if self._check_fits(each, self.space.min_bytes(each))]
        outlooks = ScheduleEstimates(self.space)
        found = [(each, reported) for each in possible if (reported := outlooks.get(each)) is not None]
        if not found:
            return
        self.candidates = [each for each, _ in found]
        for at, each in enumerate(self.candidates):
            for key in _refusal_keys(each):
                self._similar.setdefault(key, []).append(at)
        self._expected = CandidateEstimates(self.space, self.candidates, [reported for _, reported in found])
        self._seeds = _choose_seeds(self.candidates)
        pending: dict[Future[Any], int] = {}
        while True:
            while len(pending) < self.num_workers and (number := self._choose_next(pending.values())) is not None:
                request = self._build_request(self._single_stage(self.candidates[number]))
                pending[self.executor.submit(handle_request, request)] = number
            left = (TRACING_TIME_FRACTION + DRAIN_TIME_FRACTION) * self.time_limit_s - self.elapsed
            ended = wait(pending, timeout=max(0.0, left), return_when=FIRST_COMPLETED).done
            for done in ended:
                self._learn(pending.pop(done), done.result())
            if not ended:
                return

    def plan_best(self) -> None:
        """Plan the best layouts in order, as time allows, and the first in any case; drop those that do not fit."""
        pending: dict[Future[Any], EvaluatedLayout] = {}
        started, longest = {}, 0.0
        while True:
            waiting = {each.candidate.key for each in pending.values()}
            for number, each in enumerate(self.best()):
                candidate = each.candidate
                blocks = candidate.num_microbatches * self.space.num_layers  # see `MAX_PLANNED_PIPELINE_SIZE`
                is_affordable = candidate.degrees.pp == 1 or blocks <= MAX_PLANNED_PIPELINE_SIZE
                is_open = not each.is_planned and candidate.key not in waiting and is_affordable
                has_time = number == 0 or self.elapsed + longest < self.time_limit_s
                if is_open and has_time and len(pending) < self.num_workers:
                    future = self.executor.submit(handle_request, self._build_request(candidate, is_full_plan=True))
                    pending[future], started[future] = each, self.elapsed
            if not pending:
                return
            for done in wait(pending, return_when=FIRST_COMPLETED).done:
                each, result = pending.pop(done), done.result()
                longest = max(longest, self.elapsed - started[done])
                self.num_planned += 1
                self.fitting.remove(each)
                if isinstance(result, TraceRefusal):
                    self.space.refuse(result.reason)
                else:
                    self._add_result(each.candidate, result, result["peak_reserved_bytes"])

    def best(self) -> list[EvaluatedLayout]:
        return self.ranked()[: self.num_best]

    def ranked(self) -> list[EvaluatedLayout]:
        return sorted(self.fitting, key=lambda each: each.seconds)

    def list_untraced(self) -> list[tuple[float, Candidate]]:
        """Return (expected seconds, candidate) for all candidates that could be among the best, the likeliest first."""
        if not self.candidates:
            return []
        least, expected = self._lower_bounds([])
        best = self.best()
        found = (least < math.log(best[-1].seconds if best else math.inf)).nonzero().flatten().tolist()
        found.sort(key=lambda number: float(least[number]))
        return [(math.exp(expected[number]), self.candidates[number]) for number in found]

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.started

    @property
    def rms_error(self) -> float:
        """Root-mean-square relative error of expected seconds against traced ones."""
        found = self._expected.log_errors if self.candidates else []
        return math.sqrt(sum(each**2 for each in found) / max(1, len(found)))

    def count_excluded(self) -> int:
        """Return the number of candidates that were not traced because they are not expected to fit."""
        return (
            int((self._untraced_mask & (self._expected.fit_probability() <= MIN_FIT_PROBABILITY)).sum())
            if self.candidates
            else 0
        )

    def count_untraced(self) -> int:
        return (
            int((self._untraced_mask & (self._expected.fit_probability() > MIN_FIT_PROBABILITY)).sum())
            if self.candidates
            else 0
        )

    def _choose_next(self, pending: Iterable[int]) -> int | None:
        """Return the candidate to trace next; those that share an existing trace are evaluated on the way."""
        if self._seeds:
            return self._seeds.pop(0)
        busy = list(pending)
        while self.elapsed < TRACING_TIME_FRACTION * self.time_limit_s:
            least, _ = self._lower_bounds(busy)
            least[busy] = math.inf
            number, best = int(least.argmin()), self.best()
            worst = best[-1].seconds if len(best) == self.num_best else math.inf
            if not least[number] < math.log(worst):
                return None
            known = self._quick_traces.get(_work_key(self._single_stage(self.candidates[number])))
            if known is None:
                return number
            self._learn(number, known)
        return None

    @property
    def _untraced_mask(self) -> Tensor:
        found = torch.ones(len(self.candidates), dtype=torch.bool)
        found[list(self._done)] = False
        return found

    def _lower_bounds(self, pending: Iterable[int]) -> tuple[Tensor, Tensor]:
        """Return the lower bounds and the means of log seconds; a bound is infinite if done or unlikely to fit."""
        expected, deviation = self._expected.predict_log_seconds(pending)
        chance = self._expected.fit_probability()
        could = self._untraced_mask & (chance > MIN_FIT_PROBABILITY)
        least = expected - deviation - FIT_PENALTY_EXPONENT * chance.clamp_min(MIN_FIT_PROBABILITY).log()
        return torch.where(could, least, math.inf), expected

    def _learn(self, number: int, result: QuickTrace | TraceRefusal) -> None:
        candidate = self.candidates[number]
        alone = self._single_stage(candidate)
        if _work_key(alone) not in self._quick_traces:
            self.num_traced += 1
            self._quick_traces[_work_key(alone)] = result
        if isinstance(result, TraceRefusal):
            self._refuse_similar(candidate, result)
            self._refuse_similar(alone, result)
            return
        self._done.add(number)
        if candidate.degrees.pp == 1:
            layers = self.space.num_layers
            seconds = result.predict_seconds(layers, candidate.num_microbatches)
            size = result.predict_reserved_bytes(layers)
            self._record(candidate, seconds, size)
        else:
            seconds, size = self._evaluate_schedules(candidate, result)
        if math.isfinite(seconds):
            self._expected.learn_bytes(number, result, size)
            self._expected.learn_seconds(number, seconds)

    def _evaluate_schedules(self, candidate: Candidate, trace: QuickTrace) -> tuple[float, float]:
        """Record a pipeline under each schedule, from a trace on one stage; return seconds and bytes of the fastest."""
        ranks, layers, count = candidate.degrees.pp, self.space.num_layers, candidate.num_microbatches
        best = (math.inf, math.inf)
        for each in self.space.expand_schedules(candidate):
            try:
                waiting, live = self.space.estimate_schedule(each, trace.head_blocks)
            except MeshwrightError as error:
                self.space.refuse(str(error))
                continue
            seconds = trace.predict_pipeline_seconds(layers, count, ranks, waiting)
            size = trace.predict_pipeline_reserved_bytes(layers, ranks, live)
            self._record(each, seconds, size)
            best = min(best, (seconds, size))
        return best

    def _record(self, candidate: Candidate, seconds: float, size: float) -> None:
        tokens = int(self.space.values["batch_size"]) * self.space.seq_len
        reported = {
            "strategy": str(self.space.resolve_stack(candidate)),
            "mesh": str(candidate.degrees),
            "step_seconds": seconds,
            "tokens_per_second_per_device": tokens / seconds / self.space.world_size,
            "peak_reserved_bytes": round(size),
        }
        self._add_result(candidate, reported, size)

    def _add_result(self, candidate: Candidate, plan: Mapping[str, Any], size: float) -> None:
        (self.fitting if self._check_fits(candidate, size) else self.not_fitting).append(
            EvaluatedLayout(candidate, plan)
        )

    def _refuse_similar(self, candidate: Candidate, refusal: TraceRefusal) -> None:
        """Reject a candidate and similar ones: of any batch size, unless the batch is the reason."""
        new = {*self._similar.get(_refusal_keys(candidate)[refusal.depends_on_batch], ())} - self._done
        self.space.refuse(refusal.reason, len(new))
        self._done |= new

    def _check_fits(self, candidate: Candidate, size: float) -> bool:
        if fits_in_memory(int(size), self.space.device):
            return True
        self.num_too_large += 1
        if size < self.nearest[0]:
            self.nearest = (size, candidate)
        return False

    def _single_stage(self, candidate: Candidate) -> Candidate:
        """Return the candidate on one stage, with at most two microbatches, as in a quick trace."""
        count = min(2, candidate.num_microbatches)
        if candidate.degrees.pp == 1:
            return replace(candidate, num_microbatches=count)
        alone = replace(candidate.degrees, pp=1)
        sizes = get_mesh_sizes(alone).model_dump()
        values = {key: sizes.get(key, value) for key, value in candidate.values.items()}
        values |= {"wrapper_config": {}}
        return replace(
            candidate, degrees=alone, num_microbatches=count, values=values, wrapper_options=None, schedule=""
        )

    def _build_request(self, candidate: Candidate, *, is_full_plan: bool = False) -> TraceRequest:
        values = set_dotted_keys(self.space.values, candidate.values.items())
        values["batch_size"] = candidate.degrees.dp * candidate.micro_batch_size * candidate.num_microbatches
        return TraceRequest(
            values, candidate.degrees.world_size, self.space.device, self.expert_imbalance, is_full_plan
        )


def _choose_seeds(candidates: Sequence[Candidate]) -> list[int]:
    """Return the candidates to trace first: one with the largest tp, and one for each activation checkpointing."""
    alone = [at for at, each in enumerate(candidates) if each.degrees.pp == 1] or [0]
    most, first = alone[0], candidates[alone[0]]
    found: dict[Any, int] = {}
    for at in alone:
        each = candidates[at]
        if (each.family, each.micro_batch_size) == (first.family, first.micro_batch_size):
            most = max(most, at, key=lambda at: candidates[at].degrees.tp)
            if each.degrees == first.degrees:
                found.setdefault(each.activation_checkpointing, at)
    return list(dict.fromkeys([most, *found.values()]))


def _work_key(candidate: Candidate) -> tuple[Any, ...]:
    """Return a key that is equal for candidates whose quick traces are equal."""
    return (
        candidate.family,
        candidate.activation_checkpointing,
        candidate.micro_batch_size,
        candidate.degrees,
        candidate.num_microbatches,
    )


def _refusal_keys(candidate: Candidate) -> list[tuple[Any, ...]]:
    degrees = candidate.degrees
    are_above_one = (degrees.pp > 1, degrees.dp_replicate > 1, degrees.dp_shard > 1)
    alike = (candidate.family, degrees.tp, degrees.cp, degrees.ep, *are_above_one)
    return [
        alike,
        (*alike, candidate.activation_checkpointing, candidate.micro_batch_size, degrees, candidate.schedule),
    ]

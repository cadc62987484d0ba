"""Quick traces of candidates, and estimates of time and memory for the candidates that are not traced.

[Note: extrapolation] Each block and each microbatch adds the same time and memory. Traces of two depths give the cost
of a block, and the first of two microbatches gives the cost of a further one. The stages of a pipeline compute what
the same model computes on one stage; the schedule's own timeline gives the idle time.

[Note: the estimate] The logarithms of four quantities of a candidate are linear in its features: device seconds per
token, bytes per parameter between steps, and bytes at the peak of activations and of the rest. The weights have the
priors below and are learned from traces by Bayesian linear regression (C. M. Bishop, Pattern Recognition and Machine
Learning, section 3.3), which also gives the standard deviation of each estimate. Estimates are only used to choose
what to trace. The idle time of a pipeline is computed for few microbatches: more of them do not increase it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from meshwright.plugin import BatchError, ConfigError, MeshwrightError, validate_config
from meshwright_run.run_file import RunConfig

from ..allocator import COMPUTE
from ..config import DeviceSpec
from ..planner import build_job, compute_owner_peak, get_reserved_bytes, plan_job, trace_rank
from ..timeline import Timeline, simulate_timelines
from ..trace import TrainingJob
from .candidates import Candidate, SearchSpace

QUICK_TRACE_DEPTHS = (3, 5)
"""Numbers of blocks to trace: enough for prefetching, and two apart, since some models alternate two kinds of
blocks."""


@dataclass(frozen=True)
class LinearFit:
    """A quantity as a linear function of the number of blocks."""

    intercept: float
    slope: float

    def predict(self, layers: float) -> float:
        return self.intercept + self.slope * layers

    @staticmethod
    def fit(depths: Sequence[int], values: Sequence[float]) -> LinearFit:
        if len(depths) == 1:
            return LinearFit(values[0], 0.0)
        slope = max(0.0, (values[-1] - values[0]) / (depths[-1] - depths[0]))
        return LinearFit(values[0] - slope * depths[0], slope)


@dataclass(frozen=True)
class QuickTrace:
    """Time and memory of a step of one or two microbatches on one stage; see [Note: extrapolation]."""

    num_microbatches: int
    step_seconds: LinearFit
    microbatch_seconds: LinearFit  # forward and backward of the first microbatch
    phase_peaks: Mapping[str, LinearFit]  # bytes at the peak of each phase
    spare_bytes: (
        float  # maximum of reserved minus allocated bytes; not extrapolated, since two depths do not show its growth
    )
    persistent_bytes: LinearFit  # between steps
    activation_bytes: LinearFit  # at their own peak

    def predict_seconds(self, layers: int, microbatches: int) -> float:
        return self.step_seconds.predict(layers) + (
            microbatches - self.num_microbatches
        ) * self.microbatch_seconds.predict(layers)

    def predict_reserved_bytes(self, layers: float) -> float:
        return max(line.predict(layers) for line in self.phase_peaks.values()) + self.spare_bytes

    def predict_pipeline_seconds(self, layers: int, microbatches: int, ranks: int, bubble: float) -> float:
        """Return the time of a step [s] on `ranks` stages, which are idle for the fraction `bubble` of it."""
        working = microbatches * self.microbatch_seconds.predict(layers) / ranks / (1 - bubble)
        rest = self.step_seconds.predict(layers / ranks) - self.num_microbatches * self.microbatch_seconds.predict(
            layers / ranks
        )
        return working + max(0.0, rest)

    def predict_pipeline_reserved_bytes(self, layers: int, ranks: int, live_microbatches: float) -> float:
        """Return the reserved bytes of a pipeline rank that holds the activations of `live_microbatches` at once."""
        here = layers / ranks
        return self.predict_reserved_bytes(here) + max(0.0, live_microbatches - 1) * self.activation_bytes.slope * here

    @property
    def head_blocks(self) -> float:
        """Time of the layers outside of blocks, as a number of blocks."""
        return (
            self.microbatch_seconds.intercept / self.microbatch_seconds.slope
            if self.microbatch_seconds.slope > 0
            else 0.0
        )


@dataclass(frozen=True)
class TraceRequest:
    """Request to a worker process: a full plan of a run if `is_full_plan`, else a quick trace."""

    values: Mapping[str, Any]
    world_size: int
    device: DeviceSpec
    expert_imbalance: float
    is_full_plan: bool


@dataclass(frozen=True)
class TraceRefusal:
    """Reason why a candidate cannot be traced. `depends_on_batch`: another micro-batch size may be accepted."""

    reason: str
    depends_on_batch: bool


def handle_request(request: TraceRequest) -> QuickTrace | dict[str, Any] | TraceRefusal:
    """Return a quick trace or a plan, or the reason why there is none."""
    try:
        config = validate_config(RunConfig, request.values, where="a candidate")
        job = replace(build_job(config, request.world_size), expert_imbalance=request.expert_imbalance)
        return plan_job(job, request.device) if request.is_full_plan else quick_trace(job, request.device)
    except MeshwrightError as error:
        return TraceRefusal(str(error), isinstance(error, BatchError | ConfigError))


def quick_trace(job: TrainingJob, device: DeviceSpec) -> QuickTrace:
    """Trace the first rank of a job without a pipeline, with few blocks."""
    shallow = job.build_with_layers is not None and job.num_layers > QUICK_TRACE_DEPTHS[-1]
    depths = QUICK_TRACE_DEPTHS if shallow else (max(1, job.num_layers),)
    library, spare = device.library_bytes, 0.0
    rows: list[tuple[float, ...]] = []
    peaks: list[Mapping[str, int]] = []
    for depth in depths:
        found = trace_rank(job.with_num_layers(depth) if shallow else job, 0)
        (line,) = simulate_timelines(
            [found], job.degrees, device, is_compiled=job.is_compiled, chunked_groups=job.chunked_groups
        )
        beyond = get_reserved_bytes(found, device) - found.peak.bytes - library
        spare = max(spare, beyond) if rows else beyond
        rows.append(
            (
                line.seconds,
                _first_microbatch_end(line),
                found.between_steps.bytes + library,
                compute_owner_peak(found, "activations"),
            )
        )
        peaks.append({phase: most + library for phase, most in found.peak.peak_by_phase.items()})
    step, first, held, activations = (LinearFit.fit(depths, values) for values in zip(*rows, strict=True))
    phases = {phase: LinearFit.fit(depths, [each.get(phase, 0) for each in peaks]) for phase in peaks[-1]}
    return QuickTrace(job.num_microbatches, step, first, phases, spare, held, activations)


def _first_microbatch_end(timeline: Timeline) -> float:
    """Return the time at which the backward of the first microbatch has ended [s]."""
    has_turned = False
    for span in timeline.spans:
        if span.stream == COMPUTE:
            if has_turned and span.phase != "backward":
                return span.start
            has_turned = has_turned or span.phase == "backward"
    return timeline.seconds


Prior: TypeAlias = tuple[float, float]  # Mean and standard deviation
ScheduleEstimate: TypeAlias = tuple[float, float]
"""Minimum over all schedules of the idle fraction, and of the activations that a rank holds, in microbatches of the
full model."""
NOISE_STD = 0.07  # Standard deviation of the noise of a logarithm
MIN_REST_FRACTION = 0.05  # Minimum fraction of a peak that is neither persistent nor activations
_DEFAULT_PRIOR: Prior = (0, 0.07)  # Of one size of an axis: its deviation from linearity in the logarithm
_PRIORS: Mapping[str, tuple[Prior, Prior, Prior]] = {
    "all": ((0, 10), (0, 10), (0, 10)),
    "family": ((0, 0.3), (0, 0.1), (0, 0.5)),
    "recomputed False": ((0, 0.05), (0, 0.05), (0, 0.05)),
    "recomputed selective": ((0.07, 0.07), (-0.4, 0.3), (0, 0.2)),
    "recomputed full": ((0.25, 0.1), (-2, 0.5), (0, 0.2)),
    "one microbatch": ((0, 0.1), (0, 0.05), (-0.3, 0.5)),
    "few rows": ((0.1, 0.1), _DEFAULT_PRIOR, _DEFAULT_PRIOR),
    "log2 rows": (_DEFAULT_PRIOR, (0.69, 0.05), (0.2, 0.2)),
    "log2 tp": ((0.05, 0.05), (-0.6, 0.1), (-0.6, 0.1)),
    "log2 cp": ((0.1, 0.05), (-0.6, 0.1), (-0.1, 0.2)),
    "log2 ep": ((0.05, 0.1), (0, 0.1), (-0.3, 0.3)),
    "log2 pp": ((0.03, 0.03), (0, 0.05), (-0.3, 0.3)),
    "log2 shards": ((0.03, 0.03), (0, 0.02), (0, 0.02)),
    "hybrid": ((0, 0.1), (0, 0.02), (0, 0.1)),
}
"""Priors of device seconds, of activations and of the rest."""
_SECONDS, _ACTIVATIONS, _REST = ({name: each[index] for name, each in _PRIORS.items()} for index in range(3))
_PERSISTENT: Mapping[str, Prior] = {
    "all": (2.7, 0.3),
    "family": (0, 0.2),
    "log2 pp": (-0.69, 0.05),
    "log2 tp": (-0.69, 0.1),
    "log2 ep": (0, 0.1),
    "family, log2 shards": (-0.69, 0.2),
    "family, log2 copies": (0, 0.3),
}


@dataclass
class BayesianRegression:
    """Regression of one quantity over all candidates; see [Note: the estimate]. `offset` is added to the prediction."""

    priors: Mapping[str, Prior]
    features: Sequence[Mapping[str, float]]
    offset: Tensor
    observations: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = sorted({name for each in self.features for name in each})
        column = {name: index for index, name in enumerate(names)}
        self._matrix = torch.zeros(len(self.features), len(names), dtype=torch.float64)
        rows = [row for row, each in enumerate(self.features) for _ in each]
        columns = [column[name] for each in self.features for name in each]
        values = torch.tensor([value for each in self.features for value in each.values()], dtype=torch.float64)
        self._matrix[rows, columns] = values
        # A feature has the prior of its name, or else of the part before the colon.
        priors = [self.priors.get(name, self.priors.get(name.partition(":")[0], _DEFAULT_PRIOR)) for name in names]
        self._mean, self._deviation = torch.tensor(priors, dtype=torch.float64).T
        self._posterior: tuple[Tensor, Tensor] | None = None

    def learn(self, number: int, value: float) -> None:
        self.observations[number], self._posterior = value, None

    def posterior(self) -> tuple[Tensor, Tensor]:
        """Return expected logarithms and their standard deviations, float64, one for each candidate."""
        if self._posterior is None:
            self._posterior = self._fit({})
        return self._posterior

    def posterior_assuming(self, numbers: Iterable[int]) -> tuple[Tensor, Tensor]:
        """Return the posterior if candidates `numbers` had their expected values."""
        mean, _ = self.posterior()
        more = {number: float(mean[number]) for number in numbers}
        return self._fit(more) if more else self.posterior()

    def _fit(self, more: Mapping[int, float]) -> tuple[Tensor, Tensor]:
        given = {**self.observations, **more}
        seen = self._matrix[list(given)]
        precision = torch.diag(self._deviation**-2) + seen.T @ seen / NOISE_STD**2
        target = torch.tensor([*given.values()], dtype=torch.float64) - self.offset[list(given)] - seen @ self._mean
        spread = torch.linalg.inv(precision)
        weights = self._mean + spread @ (seen.T @ target) / NOISE_STD**2
        variance = ((self._matrix @ spread) * self._matrix).sum(1)
        return self.offset + self._matrix @ weights, variance.clamp_min(0).sqrt()


def _work_features(candidate: Candidate) -> dict[str, float]:
    degrees = candidate.degrees
    sizes = {"rows": candidate.micro_batch_size, "tp": degrees.tp, "cp": degrees.cp, "ep": degrees.ep, "pp": degrees.pp}
    features = {"all": 1.0, f"family: {candidate.family}": 1.0, f"recomputed {candidate.activation_checkpointing}": 1.0}
    for name, size in sizes.items():
        if size > 1:
            features |= {f"log2 {name}": math.log2(size), f"{name} {size}": 1.0}
    features["few rows"] = 1 / candidate.micro_batch_size
    if candidate.num_microbatches == 1:
        features["one microbatch"] = 1.0
    if degrees.dp_shard > 1:
        features["log2 shards"] = math.log2(degrees.dp_shard)
    if degrees.dp_shard > 1 and degrees.dp_replicate > 1:
        features["hybrid"] = 1.0
    return features


def _state_features(candidate: Candidate) -> dict[str, float]:
    degrees = candidate.degrees
    sizes = {"log2 pp": degrees.pp, "log2 tp": degrees.tp, "log2 ep": degrees.ep}
    sizes[f"family, log2 shards: {candidate.family}"] = degrees.dp_shard * degrees.cp
    sizes[f"family, log2 copies: {candidate.family}"] = degrees.dp_replicate
    features = {"all": 1.0, f"family: {candidate.family}": 1.0}
    return features | {name: math.log2(size) for name, size in sizes.items() if size > 1}


class ScheduleEstimates:
    def __init__(self, space: SearchSpace) -> None:
        self._space = space
        self._cache: dict[tuple[int, int], ScheduleEstimate | str] = {}

    def get(self, candidate: Candidate) -> ScheduleEstimate | None:
        """Return the estimate of a candidate; None if all schedules reject it, which is counted."""
        ranks, count = candidate.degrees.pp, candidate.num_microbatches
        if ranks == 1:
            return 0.0, 1.0
        few = min(count, 2 * ranks)
        if (ranks, few) not in self._cache:
            self._cache[ranks, few] = self._estimate(replace(candidate, micro_batch_size=1, num_microbatches=few))
        reported = self._cache[ranks, few]
        if isinstance(reported, str):
            self._space.refuse(reported)
            return None
        waiting, live = reported
        idle = few * waiting / (1 - waiting)
        return idle / (idle + count), live / ranks

    def _estimate(self, candidate: Candidate) -> ScheduleEstimate | str:
        found, reason = [], ""
        for each in self._space.expand_schedules(candidate):
            try:
                found.append(self._space.estimate_schedule(each, 0.0))
            except MeshwrightError as error:
                reason = str(error)
        if not found:
            return reason
        waiting, live = zip(*found, strict=True)
        return min(waiting), min(live)


@dataclass
class CandidateEstimates:
    """Estimates for all candidates. `log_errors` are the logarithms of traced over expected seconds."""

    space: SearchSpace
    candidates: Sequence[Candidate]
    schedule_estimates: Sequence[ScheduleEstimate]
    log_errors: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        waiting, live = torch.tensor(self.schedule_estimates, dtype=torch.float64).T
        work, state = [*map(_work_features, self.candidates)], [*map(_state_features, self.candidates)]
        nothing = torch.zeros_like(live)
        self._seconds = BayesianRegression(_SECONDS, work, -(1 - waiting).log())
        self._held = BayesianRegression(_PERSISTENT, state, nothing)
        self._activations = BayesianRegression(_ACTIVATIONS, work, live.log())
        self._rest = BayesianRegression(_REST, work, nothing)
        self._scale = math.log(int(self.space.values["batch_size"]) * self.space.seq_len / self.space.world_size)

    def predict_log_seconds(self, pending: Iterable[int]) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation of log seconds, if `pending` candidates have their expected values."""
        mean, deviation = self._seconds.posterior_assuming(pending)
        return mean + self._scale, deviation

    def fit_probability(self) -> Tensor:
        reported = [each.posterior() for each in (self._held, self._activations, self._rest)]
        parts = [mean.exp() for mean, _ in reported]
        parts[0] *= self.space.model_size.num_parameters
        size, device = sum(parts), self.space.device
        spread = sum(part * deviation for part, (_, deviation) in zip(parts, reported, strict=True)) / size
        room = torch.tensor(device.memory_bytes - device.context_bytes, dtype=torch.float64)
        return torch.special.ndtr((room.log() - size.log()) / spread.clamp_min(1e-3))

    def learn_seconds(self, number: int, seconds: float) -> None:
        reported = math.log(seconds) - self._scale
        if self._seconds.observations:
            self.log_errors.append(reported - float(self._seconds.posterior()[0][number]))
        self._seconds.learn(number, reported)

    def learn_bytes(self, number: int, trace: QuickTrace, size: float) -> None:
        """Learn from the bytes of a candidate, `size`, which `trace` splits by owner."""
        layers = self.space.num_layers / self.candidates[number].degrees.pp
        held, activations = trace.persistent_bytes.predict(layers), trace.activation_bytes.predict(layers)
        # The peak of activations need not be the peak of memory.
        rest = max(MIN_REST_FRACTION * size, size - held - activations)
        self._held.learn(number, math.log(held / self.space.model_size.num_parameters))
        self._activations.learn(number, math.log(activations))
        self._rest.learn(number, math.log(rest))

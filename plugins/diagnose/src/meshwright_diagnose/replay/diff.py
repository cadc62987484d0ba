"""Compare two runs: settings that differ, the first step that differs, and its first tensor and module.

[Note: cause before effect] The parts of a step are compared in causal order: rows and learning rates, parameters before
the step, module outputs, loss, gradients, parameters after the step. If one part is the same and the next one differs,
the computation between them differs.

[Note: rounding that grows] Sums in another order differ in the last bit. At the edge of stability these differences
grow from step to step even in correct runs: from 1e-7 to 1e-3 in twenty steps, where float64 agrees to 1e-16. So the
size of a difference says less than its history: it grew step by step from a rounding error, or came at once. Even a
small jump is reported: a wrong gradient in one layer may hardly change the norm of all gradients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from meshwright.plugin import CheckpointError, ConfigError, StepResult, is_launched
from meshwright_run.run_file import to_redacted_dict
from meshwright_run.settings_diff import diff_settings

from .replay import relative_difference, run_request
from .request import (
    EPSILONS,
    TOLERANCES,
    RecordedRun,
    ReplayRequest,
    ReplayRunner,
    build_request,
    collect_values,
    disable_dropout,
    find_dropout_keys,
    find_precision,
    resolve_degrees,
    scratch_directory,
    to_float64,
)
from .tensors import TensorDiffs, compare_outputs, compare_saved_tensors, load_outputs

NUMERIC_KEYS = (
    *("model", "data", "steps", "epochs", "batch_size", "optimizer", "schedule", "seed", "objective", "ema"),
    *("max_grad_norm", "grad_norm_type", "seq_len"),
)
"""Keys of a run file that determine the results of a run."""
NON_NUMERIC_KEYS = (
    *("output_dir", "overwrite", "resume", "sample", "log_every", "trackers", "metrics", "profile", "launch"),
    *("plan", "checkpoint", "timeout_s", "data.cache_dir", "eval"),
)
"""Keys that do not affect the results of a step."""
EXACT_TOLERANCE = 1e-9  # Tolerance of learning rates and token counts, which have no rounding errors
JUMP_FACTOR = 100.0
"""A difference above this multiple of all earlier ones, and of the dtype's epsilon, is a jump, not rounding."""


@dataclass(frozen=True)
class Divergence:
    """First step at which a metric of two runs differs beyond rounding; `first_step`: at which it differs at all."""

    name: str
    step: int
    one: float | None
    other: float | None
    max_before: float
    first_step: int
    is_jump: bool

    @property
    def relative_difference(self) -> float:
        return relative_difference(self.one, self.other)


@dataclass(frozen=True)
class MetricComparison:
    """First and last common step of two runs, divergences in order, and the largest relative difference by name."""

    steps: tuple[int, int]
    divergences: tuple[Divergence, ...]
    largest_differences: Mapping[str, float]


@dataclass(frozen=True)
class StepComparison:
    """A step of both runs, replayed in both layouts; `mode`: how the replays differ from the runs."""

    step: int
    mode: str
    starts: tuple[str, str]
    has_same_rows: bool
    values: Mapping[str, tuple[float | None, float | None]]
    tolerance: float
    parameters_before: TensorDiffs
    outputs: TensorDiffs | None
    gradients: TensorDiffs
    parameters_after: TensorDiffs
    reason: str = ""

    @property
    def is_same(self) -> bool:
        tensors = (self.parameters_before, self.outputs, self.gradients, self.parameters_after)
        numbers = all(relative_difference(*pair) <= self.tolerance for pair in self.values.values())
        return (
            self.has_same_rows
            and numbers
            and not any(each is not None and each.num_beyond_tolerance for each in tensors)
        )

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self)
        return {"from": values.pop("starts"), **values, "is_same": self.is_same}


@dataclass(frozen=True)
class RunDiff:
    """Differences between two runs."""

    runs: tuple[str, str]
    settings: tuple[tuple[str, str, str], ...]
    layout: tuple[tuple[str, str, str], ...]
    metrics: MetricComparison
    resumed_after: tuple[int | None, int | None]
    replayed: StepComparison | None  # None: no step was replayed; `unavailable_reason` may say why
    unavailable_reason: str
    precision: str  # the lower precision of both

    @property
    def first_divergence(self) -> Divergence | None:
        return self.metrics.divergences[0] if self.metrics.divergences else None

    @property
    def exit_code(self) -> int:
        return (
            1 if self.first_divergence is not None or (self.replayed is not None and not self.replayed.is_same) else 0
        )

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self)
        metrics = values.pop("metrics")
        return {
            **values,
            **metrics,
            "divergences": [
                {**asdict(each), "relative_difference": each.relative_difference} for each in self.metrics.divergences
            ],
            "replayed": None if self.replayed is None else self.replayed.to_dict(),
            "is_same": self.exit_code == 0,
        }


def diff_runs(
    one: Path,
    other: Path,
    *,
    rtol: float | None = None,
    step: int | None = None,
    replays: bool = True,
    float64: bool = False,
    show_traceback: bool = False,
    runner: ReplayRunner | None = None,
) -> RunDiff:
    """Compare two runs, and replay a step, by default the first that differs; see [Note: cause before effect]."""
    if is_launched():
        raise ConfigError("diff starts the ranks of both layouts itself, in turn. Start it without a launcher.")
    if rtol is not None and not rtol > 0:
        raise ConfigError(f"--rtol {rtol} must be above 0, such as 1e-6.")
    runs = RecordedRun(one), RecordedRun(other)
    for run in runs if step is not None else ():
        run.get_result(step or 0)
    precision = max((find_precision(run.config) for run in runs), key=EPSILONS.__getitem__)
    settings = diff_settings(*(to_redacted_dict(run.config) for run in runs))
    metrics = compare_metrics(*runs, rtol=rtol, precision=precision)
    which = step or (metrics.divergences[0].step if metrics.divergences else None)
    sections = [(each, each[0].partition(".")[0]) for each in settings]
    result = RunDiff(
        runs=(str(one), str(other)),
        settings=tuple(
            each for each, section in sections if section in NUMERIC_KEYS and each[0] not in NON_NUMERIC_KEYS
        ),
        layout=tuple(each for each, section in sections if section not in NUMERIC_KEYS + NON_NUMERIC_KEYS),
        metrics=metrics,
        resumed_after=(None, None)
        if which is None
        else (runs[0].find_resume_step(which), runs[1].find_resume_step(which)),
        replayed=None,
        unavailable_reason="",
        precision=precision,
    )
    if which is None or not replays:
        return result
    try:
        run_replay = runner or partial(run_request, show_traceback=show_traceback)
        comparison = _replay_both(runs, which, float64=float64, rtol=rtol, precision=precision, runner=run_replay)
    except (ConfigError, CheckpointError) as error:
        if step is not None or float64:
            raise
        return replace(result, unavailable_reason=str(error))
    return replace(result, replayed=comparison)


# -- metrics


def compare_metrics(one: RecordedRun, other: RecordedRun, *, rtol: float | None, precision: str) -> MetricComparison:
    """Compare the metrics of two runs. Without `rtol`: with the tolerance of `precision`, and for jumps."""
    steps = sorted(one.results.keys() & other.results.keys())
    if not steps:
        raise ConfigError(
            f"{one.directory} has steps {min(one.results)} to {max(one.results)}, and {other.directory} "
            f"{min(other.results)} to {max(other.results)}: no step is in both."
        )
    numbers = {step: (_collect_numbers(one.results[step]), _collect_numbers(other.results[step])) for step in steps}
    names = list(dict.fromkeys(name for pair in numbers.values() for each in pair for name in each))
    divergences, largest = [], {}
    for name in names:
        # Metrics that only one run has measured are not compared.
        pairs = {step: (a[name], b[name]) for step, (a, b) in numbers.items() if name in a and name in b}
        if not pairs:
            continue
        differences = {
            step: _relative_difference(name, *pair, one.results[step].num_tokens) for step, pair in pairs.items()
        }
        largest[name] = max(differences.values())
        is_exact, epsilon = name == "num_tokens" or name.startswith("learning_rate"), EPSILONS[precision]
        tolerance = EXACT_TOLERANCE if is_exact else TOLERANCES[precision] if rtol is None else rtol
        at = _first_divergent_step(
            differences, tolerance, epsilon, JUMP_FACTOR if rtol is None and not is_exact else math.inf
        )
        if at is not None:
            before = max((each for step, each in differences.items() if step < at), default=0.0)
            first = next(step for step, each in differences.items() if each > 0)
            is_jump = is_exact or differences[at] > JUMP_FACTOR * max(before, epsilon)
            divergences.append(Divergence(name, at, *pairs[at], before, first, is_jump))
    divergences.sort(key=lambda each: (each.step, names.index(each.name)))
    return MetricComparison((steps[0], steps[-1]), tuple(divergences), largest)


def _collect_numbers(result: StepResult) -> dict[str, float]:
    return {
        **collect_values(result),
        **{f"norm of {part}": value for part, value in result.block_grad_norms.items()},
        **{f"evaluation {name}": value for name, value in result.evaluations.items()},
    }


def _relative_difference(name: str, one: float, other: float, num_tokens: int) -> float:
    """Return the relative difference. A sum over tokens may be near zero: it is compared to the number of tokens."""
    if name.startswith("sum ") and math.isfinite(one) and math.isfinite(other):
        return abs(one - other) / max(abs(one), abs(other), num_tokens, 1)
    return relative_difference(one, other)


def _first_divergent_step(apart: Mapping[int, float], tolerance: float, epsilon: float, jump: float) -> int | None:
    """Return the first step that differs by more than the tolerance, or `jump` times `epsilon` and all before it."""
    before = epsilon
    for step, each in apart.items():
        if each > tolerance or each > jump * before:
            return step
        before = max(before, each)
    return None


# -- replay of one step


def _replay_both(
    runs: tuple[RecordedRun, RecordedRun],
    step: int,
    *,
    float64: bool,
    rtol: float | None,
    precision: str,
    runner: ReplayRunner,
) -> StepComparison:
    with scratch_directory() as root:
        outs = [root / name for name in ("one", "other")]
        for out in outs:
            out.mkdir()
        requests = [build_request(run, step, out, saves_tensors=True) for run, out in zip(runs, outs, strict=True)]
        mode = []
        if float64:
            # Both start from one checkpoint: the runs' own checkpoints differ by rounding.
            first = requests[0].start
            backs = [run.find_rollbacks(first) for run in runs]
            started = [
                replace(request, start=first, rollbacks=back) for request, back in zip(requests, backs, strict=True)
            ]
            requests = [to_float64(request) for request in started]
            mode.append("in float64, both from the start of the first")
            precision = "float64"
        if _find_rng_degrees(requests[0]) != _find_rng_degrees(requests[1]) and any(
            models := [_find_dropouts(request) for request in requests]
        ):
            requests = [disable_dropout(request, model) for request, model in zip(requests, models, strict=True)]
            mode.append("without dropout, whose random numbers depend on the layout")
        left, right = (runner(request)["values"] for request in requests)
        traces = load_outputs(outs[0]), load_outputs(outs[1])
        tolerance = TOLERANCES[precision] if rtol is None or float64 else rtol
        reason = traces[0].reason or traces[1].reason
        before, gradients, after = (
            compare_saved_tensors(outs[0] / name, outs[1] / name, tolerance)
            for name in ("before", "gradients", "after")
        )
        return StepComparison(
            step=step,
            mode="; ".join(mode),
            starts=(_describe_start(requests[0]), _describe_start(requests[1])),
            has_same_rows=traces[0].rows == traces[1].rows,
            values={name: (left.get(name), right.get(name)) for name in {**left, **right}},
            tolerance=tolerance,
            parameters_before=before,
            outputs=None if reason else compare_outputs(*traces, tolerance),
            gradients=gradients,
            parameters_after=after,
            reason=reason,
        )


def _find_rng_degrees(request: ReplayRequest) -> tuple[int, ...]:
    """Return the degrees that the random numbers of a step depend on."""
    degrees = resolve_degrees(request.config, request.world_size)
    return degrees.dp, degrees.tp, degrees.pp, degrees.cp


def _find_dropouts(request: ReplayRequest) -> dict[str, Any]:
    from meshwright_run.preflight import prepare_data_and_model_config

    config = prepare_data_and_model_config(request.config)[1].to_dict()
    return {key: config[key] for key in find_dropout_keys(config)}


def _describe_start(request: ReplayRequest) -> str:
    path = request.start.checkpoint
    return "the start of the run" if path is None else str(path)

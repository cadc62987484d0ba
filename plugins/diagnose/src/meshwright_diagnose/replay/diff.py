"""Compare two runs: settings that differ, the step from which they differ, and its first tensor and module.

[Note: cause before effect] What a step is made of comes first: its rows and rates. Then the parameters before it, what
the modules make of the rows, the loss, gradients, and the parameters after it. Where one is the same and the next is
not, what lies between computes differently.

[Note: rounding that grows] Sums in another order differ in the last bit. At the edge of stability that grows from step
to step in correct runs: 1e-7 to 1e-3 in twenty steps, where float64 agrees to 1e-16. So what matters is not how far two
runs are apart, but how they came there: from the size of a rounding, step by step, or at once. A jump is reported even
where it is small: a gradient that is wrong in one layer may hardly change the norm of all.
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
"""Keys of a run file from which the numbers of a run follow."""
NON_NUMERIC_KEYS = (
    *("output_dir", "overwrite", "resume", "sample", "log_every", "trackers", "metrics", "profile", "launch"),
    *("plan", "checkpoint", "timeout_s", "data.cache_dir", "eval"),
)
"""Keys that change no number of a step."""
EXACT_TOLERANCE = 1e-9  # Tolerance of rates and counts, which follow from the step alone
JUMP_FACTOR = 100.0
"""More than so many times the distance before, or the dtype's rounding, does not come by rounding in one step."""


@dataclass(frozen=True)
class Divergence:
    """The first step in which a number of two runs differs beyond rounding; `first`: in which it differs at all."""

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
    """First and last common step of two runs, what differs beyond rounding, in order, and the largest differences."""

    steps: tuple[int, int]
    divergences: tuple[Divergence, ...]
    largest_differences: Mapping[str, float]


@dataclass(frozen=True)
class StepComparison:
    """One step of both runs, done again in both layouts; `mode`: what was changed of the runs."""

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
    """What two runs differ in; `precision` is the coarser dtype."""

    runs: tuple[str, str]
    settings: tuple[tuple[str, str, str], ...]
    layout: tuple[tuple[str, str, str], ...]
    metrics: MetricComparison
    resumed_after: tuple[int | None, int | None]
    replayed: (
        StepComparison | None
    )  # the first differing step, done again; None: it was not, and `unavailable_reason` may say why
    unavailable_reason: str
    precision: str  # the coarser dtype of both

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
    """Compare two runs, and do a step again, by default the first that differs; see [Note: cause before effect]."""
    if is_launched():
        raise ConfigError("diff starts the ranks of both layouts itself, one after the other. Start it by no launcher.")
    if rtol is not None and not rtol > 0:
        raise ConfigError(f"--rtol {rtol} must be above 0, such as 1e-6.")
    runs = RecordedRun(one), RecordedRun(other)
    for run in runs if step is not None else ():
        run.get_result(step or 0)
    precision = max((find_precision(run.config) for run in runs), key=EPSILONS.__getitem__)
    settings = diff_settings(*(to_redacted_dict(run.config) for run in runs))
    course = compare_metrics(*runs, rtol=rtol, precision=precision)
    which = step or (course.divergences[0].step if course.divergences else None)
    sections = [(each, each[0].partition(".")[0]) for each in settings]
    found = RunDiff(
        runs=(str(one), str(other)),
        settings=tuple(
            each for each, section in sections if section in NUMERIC_KEYS and each[0] not in NON_NUMERIC_KEYS
        ),
        layout=tuple(each for each, section in sections if section not in NUMERIC_KEYS + NON_NUMERIC_KEYS),
        metrics=course,
        resumed_after=(None, None)
        if which is None
        else (runs[0].find_resume_step(which), runs[1].find_resume_step(which)),
        replayed=None,
        unavailable_reason="",
        precision=precision,
    )
    if which is None or not replays:
        return found
    try:
        again = runner or partial(run_request, show_traceback=show_traceback)
        step_of_both = _replay_both(runs, which, float64=float64, rtol=rtol, precision=precision, runner=again)
    except (ConfigError, CheckpointError) as error:
        if step is not None or float64:
            raise
        return replace(found, unavailable_reason=str(error))
    return replace(found, replayed=step_of_both)


# -- numbers, step by step


def compare_metrics(one: RecordedRun, other: RecordedRun, *, rtol: float | None, precision: str) -> MetricComparison:
    """Compare the metrics of two runs; without `rtol`, beyond what `precision` lets one expect, and for jumps."""
    steps = sorted(one.results.keys() & other.results.keys())
    if not steps:
        raise ConfigError(
            f"{one.directory} has steps {min(one.results)} to {max(one.results)}, and {other.directory} "
            f"{min(other.results)} to {max(other.results)}: no step is in both."
        )
    numbers = {step: (_collect_numbers(one.results[step]), _collect_numbers(other.results[step])) for step in steps}
    names = list(dict.fromkeys(name for pair in numbers.values() for each in pair for name in each))
    found, largest = [], {}
    for name in names:
        # Two runs do not differ in what only one of them has measured.
        pairs = {step: (a[name], b[name]) for step, (a, b) in numbers.items() if name in a and name in b}
        if not pairs:
            continue
        apart = {step: _relative_difference(name, *pair, one.results[step].num_tokens) for step, pair in pairs.items()}
        largest[name] = max(apart.values())
        is_exact, epsilon = name == "num_tokens" or name.startswith("learning_rate"), EPSILONS[precision]
        tolerance = EXACT_TOLERANCE if is_exact else TOLERANCES[precision] if rtol is None else rtol
        at = _first_divergent_step(
            apart, tolerance, epsilon, JUMP_FACTOR if rtol is None and not is_exact else math.inf
        )
        if at is not None:
            before = max((each for step, each in apart.items() if step < at), default=0.0)
            first = next(step for step, each in apart.items() if each > 0)
            is_jump = is_exact or apart[at] > JUMP_FACTOR * max(before, epsilon)
            found.append(Divergence(name, at, *pairs[at], before, first, is_jump))
    found.sort(key=lambda each: (each.step, names.index(each.name)))
    return MetricComparison((steps[0], steps[-1]), tuple(found), largest)


def _collect_numbers(result: StepResult) -> dict[str, float]:
    return {
        **collect_values(result),
        **{f"norm of {part}": value for part, value in result.block_grad_norms.items()},
        **{f"evaluation {name}": value for name, value in result.evaluations.items()},
    }


def _relative_difference(name: str, one: float, other: float, num_tokens: int) -> float:
    """The relative difference; a sum over tokens may be near zero, and its terms are not."""
    if name.startswith("sum ") and math.isfinite(one) and math.isfinite(other):
        return abs(one - other) / max(abs(one), abs(other), num_tokens, 1)
    return relative_difference(one, other)


def _first_divergent_step(apart: Mapping[int, float], tolerance: float, epsilon: float, jump: float) -> int | None:
    """The first step beyond the tolerance, or more than `jump` times as far apart as a rounding and all before."""
    before = epsilon
    for step, each in apart.items():
        if each > tolerance or each > jump * before:
            return step
        before = max(before, each)
    return None


# -- one step, done again


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
        orders = [build_request(run, step, out, saves_tensors=True) for run, out in zip(runs, outs, strict=True)]
        mode = []
        if float64:
            # Both from one checkpoint: what each had rounded in its own way would begin apart.
            first = orders[0].start
            backs = [run.find_rollbacks(first) for run in runs]
            started = [replace(order, start=first, rollbacks=back) for order, back in zip(orders, backs, strict=True)]
            orders = [to_float64(order) for order in started]
            mode.append("in float64, both from what the first began with")
            precision = "float64"
        if _find_rng_degrees(orders[0]) != _find_rng_degrees(orders[1]) and any(
            models := [_find_dropouts(order) for order in orders]
        ):
            orders = [disable_dropout(order, model) for order, model in zip(orders, models, strict=True)]
            mode.append("without dropout, for which the two layouts draw other numbers")
        left, right = (runner(order)["values"] for order in orders)
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
            starts=(_describe_start(orders[0]), _describe_start(orders[1])),
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
    """The degrees on which the random numbers of a step depend."""
    degrees = resolve_degrees(request.config, request.world_size)
    return degrees.dp, degrees.tp, degrees.pp, degrees.cp


def _find_dropouts(request: ReplayRequest) -> dict[str, Any]:
    from meshwright_run.preflight import prepare_data_and_model_config

    config = prepare_data_and_model_config(request.config)[1].to_dict()
    return {key: config[key] for key in find_dropout_keys(config)}


def _describe_start(request: ReplayRequest) -> str:
    path = request.start.checkpoint
    return "the beginning of the run" if path is None else str(path)

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

from meshwright.plugin import CheckpointError, ConfigError, StepResult, started_by_launcher
from meshwright_run.run_file import as_plain, differing_settings

from .order import (
    EPSILONS,
    TOLERANCES,
    Order,
    Perform,
    Recorded,
    degrees_of,
    dropouts,
    in_float64,
    order_of,
    plain_of,
    precision_of,
    scratch,
    without_dropout,
)
from .start import performed, relative
from .tensors import Differences, differences, different_outputs, traced

NUMBERS = (
    *("model", "data", "steps", "epochs", "batch_size", "optimizer", "schedule", "seed", "objective", "ema"),
    *("max_grad_norm", "grad_norm_type", "seq_len"),
)
"""Keys of a run file from which the numbers of a run follow."""
ELSEWHERE = (
    *("output_dir", "overwrite", "resume", "sample", "log_every", "trackers", "metrics", "profile", "launch"),
    *("plan", "checkpoint", "timeout_s", "data.cache_dir", "eval"),
)
"""Keys that change no number of a step."""
EXACT = 1e-9  # Tolerance of rates and counts, which follow from the step alone
JUMP = 100.0
"""More than so many times the distance before, or the dtype's rounding, does not come by rounding in one step."""


@dataclass(frozen=True)
class Parted:
    """The first step in which a number of two runs differs beyond rounding; `first`: in which it differs at all."""

    name: str
    step: int
    one: float | None
    other: float | None
    before: float
    first: int
    is_jump: bool

    @property
    def apart(self) -> float:
        return relative(self.one, self.other)


@dataclass(frozen=True)
class Course:
    """First and last common step of two runs, what differs beyond rounding, in order, and the largest differences."""

    steps: tuple[int, int]
    parted: tuple[Parted, ...]
    largest: Mapping[str, float]


@dataclass(frozen=True)
class Step:
    """One step of both runs, done again in both layouts; `mode`: what was changed of the runs."""

    step: int
    mode: str
    beginnings: tuple[str, str]
    same_rows: bool
    values: Mapping[str, tuple[float | None, float | None]]
    tolerance: float
    before: Differences
    outputs: Differences | None
    gradients: Differences
    after: Differences
    reason: str = ""

    @property
    def is_same(self) -> bool:
        tensors = (self.before, self.outputs, self.gradients, self.after)
        numbers = all(relative(*pair) <= self.tolerance for pair in self.values.values())
        return self.same_rows and numbers and not any(each is not None and each.beyond for each in tensors)

    def as_values(self) -> dict[str, Any]:
        values = asdict(self)
        return {"from": values.pop("beginnings"), **values, "is_same": self.is_same}


@dataclass(frozen=True)
class Diff:
    """What two runs differ in; `precision` is the coarser dtype."""

    runs: tuple[str, str]
    settings: tuple[tuple[str, str, str], ...]
    layout: tuple[tuple[str, str, str], ...]
    course: Course
    resumed: tuple[int | None, int | None]
    replayed: Step | None  # the first differing step, done again; None: it was not, and `why_not` may say why
    why_not: str
    precision: str  # the coarser dtype of both

    @property
    def parted(self) -> Parted | None:
        return self.course.parted[0] if self.course.parted else None

    @property
    def exit_code(self) -> int:
        return 1 if self.parted is not None or (self.replayed is not None and not self.replayed.is_same) else 0

    def as_values(self) -> dict[str, Any]:
        values = asdict(self)
        course, resumed = values.pop("course"), values.pop("resumed")
        return {
            **values,
            **course,
            "parted": [{**asdict(each), "apart": each.apart} for each in self.course.parted],
            "resumed_after": resumed,
            "replayed": None if self.replayed is None else self.replayed.as_values(),
            "is_same": self.exit_code == 0,
        }


def diff(
    one: Path,
    other: Path,
    *,
    rtol: float | None = None,
    step: int | None = None,
    replays: bool = True,
    float64: bool = False,
    show_traceback: bool = False,
    perform: Perform | None = None,
) -> Diff:
    """Compare two runs, and do a step again, by default the first that differs; see [Note: cause before effect]."""
    if started_by_launcher():
        raise ConfigError("diff starts the ranks of both layouts itself, one after the other. Start it by no launcher.")
    if rtol is not None and not rtol > 0:
        raise ConfigError(f"--rtol {rtol} must be above 0, such as 1e-6.")
    runs = Recorded(one), Recorded(other)
    for run in runs if step is not None else ():
        run.result(step or 0)
    precision = max((precision_of(run.config) for run in runs), key=EPSILONS.__getitem__)
    settings = differing_settings(*(as_plain(run.config) for run in runs))
    course = course_of(*runs, rtol=rtol, precision=precision)
    which = step or (course.parted[0].step if course.parted else None)
    sections = [(each, each[0].partition(".")[0]) for each in settings]
    found = Diff(
        runs=(str(one), str(other)),
        settings=tuple(each for each, section in sections if section in NUMBERS and each[0] not in ELSEWHERE),
        layout=tuple(each for each, section in sections if section not in NUMBERS + ELSEWHERE),
        course=course,
        resumed=(None, None) if which is None else (runs[0].went_on_before(which), runs[1].went_on_before(which)),
        replayed=None,
        why_not="",
        precision=precision,
    )
    if which is None or not replays:
        return found
    try:
        again = perform or partial(performed, show_traceback=show_traceback)
        step_of_both = _again(runs, which, float64=float64, rtol=rtol, precision=precision, perform=again)
    except (ConfigError, CheckpointError) as error:
        if step is not None or float64:
            raise
        return replace(found, why_not=str(error))
    return replace(found, replayed=step_of_both)


# -- numbers, step by step


def course_of(one: Recorded, other: Recorded, *, rtol: float | None, precision: str) -> Course:
    """Compare the metrics of two runs; without `rtol`, beyond what `precision` lets one expect, and for jumps."""
    steps = sorted(one.results.keys() & other.results.keys())
    if not steps:
        raise ConfigError(
            f"{one.directory} has steps {min(one.results)} to {max(one.results)}, and {other.directory} "
            f"{min(other.results)} to {max(other.results)}: no step is in both."
        )
    numbers = {step: (_numbers(one.results[step]), _numbers(other.results[step])) for step in steps}
    names = list(dict.fromkeys(name for pair in numbers.values() for each in pair for name in each))
    found, largest = [], {}
    for name in names:
        # Two runs do not differ in what only one of them has measured.
        pairs = {step: (a[name], b[name]) for step, (a, b) in numbers.items() if name in a and name in b}
        if not pairs:
            continue
        apart = {step: _apart(name, *pair, one.results[step].num_tokens) for step, pair in pairs.items()}
        largest[name] = max(apart.values())
        is_exact, epsilon = name == "num_tokens" or name.startswith("learning_rate"), EPSILONS[precision]
        tolerance = EXACT if is_exact else TOLERANCES[precision] if rtol is None else rtol
        at = _first(apart, tolerance, epsilon, JUMP if rtol is None and not is_exact else math.inf)
        if at is not None:
            before = max((each for step, each in apart.items() if step < at), default=0.0)
            first = next(step for step, each in apart.items() if each > 0)
            is_jump = is_exact or apart[at] > JUMP * max(before, epsilon)
            found.append(Parted(name, at, *pairs[at], before, first, is_jump))
    found.sort(key=lambda each: (each.step, names.index(each.name)))
    return Course((steps[0], steps[-1]), tuple(found), largest)


def _numbers(result: StepResult) -> dict[str, float]:
    return {
        **plain_of(result),
        **{f"norm of {part}": value for part, value in result.norms.items()},
        **{f"evaluation {name}": value for name, value in result.evaluations.items()},
    }


def _apart(name: str, one: float, other: float, num_tokens: int) -> float:
    """The relative difference; a sum over tokens may be near zero, and its terms are not."""
    if name.startswith("sum ") and math.isfinite(one) and math.isfinite(other):
        return abs(one - other) / max(abs(one), abs(other), num_tokens, 1)
    return relative(one, other)


def _first(apart: Mapping[int, float], tolerance: float, epsilon: float, jump: float) -> int | None:
    """The first step beyond the tolerance, or more than `jump` times as far apart as a rounding and all before."""
    before = epsilon
    for step, each in apart.items():
        if each > tolerance or each > jump * before:
            return step
        before = max(before, each)
    return None


# -- one step, done again


def _again(
    runs: tuple[Recorded, Recorded], step: int, *, float64: bool, rtol: float | None, precision: str, perform: Perform
) -> Step:
    with scratch() as root:
        outs = [root / name for name in ("one", "other")]
        for out in outs:
            out.mkdir()
        orders = [order_of(run, step, out, keeps=True) for run, out in zip(runs, outs, strict=True)]
        mode = []
        if float64:
            # Both from one checkpoint: what each had rounded in its own way would begin apart.
            first = orders[0].beginning
            backs = [run.went_back(first) for run in runs]
            begun = [replace(order, beginning=first, went_back=back) for order, back in zip(orders, backs, strict=True)]
            orders = [in_float64(order) for order in begun]
            mode.append("in float64, both from what the first began with")
            precision = "float64"
        if _draws(orders[0]) != _draws(orders[1]) and any(models := [_dropouts(order) for order in orders]):
            orders = [without_dropout(order, model) for order, model in zip(orders, models, strict=True)]
            mode.append("without dropout, for which the two layouts draw other numbers")
        left, right = (perform(order)["values"] for order in orders)
        traces = traced(outs[0]), traced(outs[1])
        tolerance = TOLERANCES[precision] if rtol is None or float64 else rtol
        reason = traces[0].reason or traces[1].reason
        before, gradients, after = (
            differences(outs[0] / name, outs[1] / name, tolerance) for name in ("before", "gradients", "after")
        )
        return Step(
            step=step,
            mode="; ".join(mode),
            beginnings=(_begun(orders[0]), _begun(orders[1])),
            same_rows=traces[0].rows == traces[1].rows,
            values={name: (left.get(name), right.get(name)) for name in {**left, **right}},
            tolerance=tolerance,
            before=before,
            outputs=None if reason else different_outputs(*traces, tolerance),
            gradients=gradients,
            after=after,
            reason=reason,
        )


def _draws(order: Order) -> tuple[int, ...]:
    """The degrees on which the random numbers of a step depend."""
    degrees = degrees_of(order.config, order.world_size)
    return degrees.dp, degrees.tp, degrees.pp, degrees.cp


def _dropouts(order: Order) -> dict[str, Any]:
    from meshwright_run.preflight import data_and_model_config

    config = data_and_model_config(order.config)[1].to_dict()
    return {key: config[key] for key in dropouts(config)}


def _begun(order: Order) -> str:
    path = order.beginning.checkpoint
    return "the beginning of the run" if path is None else str(path)

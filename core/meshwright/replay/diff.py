"""Where two runs part: what their files say differently, the first step, and in that step the first tensor and module.

[Note: cause before effect] What a step is made of comes first: its rows and rates. Then the parameters before it, what
the modules make of the rows, the loss, gradients, and the parameters behind it. Where one is the same and the next is
not, what lies between computes differently.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ..base.errors import CheckpointError, ConfigError
from ..launch.environment import started_by_launcher
from ..train.run.run_file import as_plain
from ..watch.compare import differing_settings
from .modules import Traced, compared, traced
from .order import (
    EPSILONS,
    TOLERANCES,
    Order,
    degrees_of,
    dropouts,
    in_float64,
    order_of,
    precision_of,
    without_dropout,
)
from .parted import Course, Parted, course_of
from .record import Recorded
from .start import Perform, performed, relative, scratch
from .tensors import Differences, differences

NUMBERS = frozenset(
    {
        *("model", "data", "steps", "epochs", "batch_size", "optimizer", "schedule", "seed", "objective", "ema"),
        *("max_grad_norm", "grad_norm_type", "seq_len"),
    }
)
"""Keys of a run file by which the numbers of a run follow."""
ELSEWHERE = frozenset(
    {
        *("output_dir", "overwrite", "resume", "sample", "log_every", "trackers", "metrics", "profile", "launch"),
        *("plan", "checkpoint", "timeout_s", "data.cache_dir", "eval"),
    }
)
"""Keys that change no number of a step."""


@dataclass(frozen=True)
class Step:
    """One step of both runs, done again in the layouts of both.

    Attributes:
        step: which.
        mode: "" for each run as it was, or what was changed.
        beginnings: what each began with.
        same_rows: whether both had the same rows.
        values: numbers of the step, by name, of both.
        tolerance: within which tensors are to agree, relatively.
        before, outputs, gradients, after: of parameters and modules, in the order of [Note: cause before effect].
        reason: why outputs of modules are not compared.
    """

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
        parts = {"before": self.before, "outputs": self.outputs, "gradients": self.gradients, "after": self.after}
        return {
            "step": self.step,
            "mode": self.mode,
            "from": list(self.beginnings),
            "same_rows": self.same_rows,
            "values": {name: list(pair) for name, pair in self.values.items()},
            "tolerance": self.tolerance,
            "is_same": self.is_same,
            **{name: None if each is None else each.as_values() for name, each in parts.items()},
            "reason": self.reason,
        }


@dataclass(frozen=True)
class Diff:
    """What two runs differ in.

    Attributes:
        runs: their directories.
        settings: keys of the run files by which numbers follow, with both values, and then those of the layout.
        course: their metrics.
        resumed: by run, the step after which the sitting that has done the parting step went on.
        replayed: the step again; None: it was not.
        why_not: why it was not.
        precision: the coarser dtype of both.
    """

    runs: tuple[str, str]
    settings: tuple[tuple[str, str, str], ...]
    layout: tuple[tuple[str, str, str], ...]
    course: Course
    resumed: tuple[int | None, int | None]
    replayed: Step | None
    why_not: str
    precision: str

    @property
    def parted(self) -> Parted | None:
        """What parts first."""
        return self.course.parted[0] if self.course.parted else None

    @property
    def exit_code(self) -> int:
        return 1 if self.parted is not None or (self.replayed is not None and not self.replayed.is_same) else 0

    def as_values(self) -> dict[str, Any]:
        """Values of JSON."""
        return {
            "runs": list(self.runs),
            "settings": [list(each) for each in self.settings],
            "layout": [list(each) for each in self.layout],
            "steps": list(self.course.steps),
            "parted": [each.as_values() for each in self.course.parted],
            "largest": dict(self.course.largest),
            "resumed_after": list(self.resumed),
            "replayed": None if self.replayed is None else self.replayed.as_values(),
            "why_not": self.why_not,
            "precision": self.precision,
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
    """Compare two runs; see [Note: cause before effect].

    Args:
        rtol: within which numbers are to agree, relatively; None: as their dtype lets one expect.
        step: that is done again, from 1; None: the first that parts.
        replays: whether it is.
        float64: do it again in float64, both from the same checkpoint.
        perform: as for `replay`.

    Raises:
        ConfigError: a directory is of no run, or the step is none.
        SystemExit: a rank of a replay has failed, and has said why.
    """
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
    parted = course.parted[0] if course.parted else None
    which = step or (parted.step if parted is not None else None)
    told: Diff = Diff(
        runs=(str(one), str(other)),
        settings=tuple(each for each in settings if _section(each[0]) in NUMBERS and each[0] not in ELSEWHERE),
        layout=tuple(each for each in settings if _section(each[0]) not in NUMBERS | ELSEWHERE),
        course=course,
        resumed=(None, None) if which is None else (runs[0].went_on_before(which), runs[1].went_on_before(which)),
        replayed=None,
        why_not="",
        precision=precision,
    )
    if which is None or not replays:
        return told
    try:
        does = perform or partial(performed, show_traceback=show_traceback)
        found = _again(runs, which, float64=float64, rtol=rtol, precision=precision, perform=does)
    except (ConfigError, CheckpointError) as error:
        if step is not None or float64:
            raise
        return replace(told, why_not=str(error))
    return replace(told, replayed=found)


def _section(key: str) -> str:
    return key.partition(".")[0]


def _again(
    runs: tuple[Recorded, Recorded],
    step: int,
    *,
    float64: bool,
    rtol: float | None,
    precision: str,
    perform: Perform,
) -> Step:
    """The step in both layouts.

    Raises:
        ConfigError, CheckpointError: it cannot be done again.
    """
    with scratch() as root:
        outs = [root / name for name in ("one", "other")]
        for out in outs:
            out.mkdir()
        orders = [order_of(run, step, out, keeps=True) for run, out in zip(runs, outs, strict=True)]
        mode = []
        if float64:
            # Rounded apart they would begin apart.
            first = orders[0].beginning
            begun = [(order, run.went_back(first)) for order, run in zip(orders, runs, strict=True)]
            orders = [in_float64(replace(order, beginning=first, went_back=back)) for order, back in begun]
            mode.append("in float64, both from what the first began with")
            precision = "float64"
        draws = [_draws(order) for order in orders]
        if draws[0] != draws[1] and any(models := [_model(order) for order in orders]):
            orders = [without_dropout(order, model) for order, model in zip(orders, models, strict=True)]
            mode.append("without dropout, for which the two layouts draw other numbers")
        found = [perform(order) for order in orders]
        traces = [traced(out) for out in outs]
        tolerance = TOLERANCES[precision] if rtol is None or float64 else rtol
        left, right = (each["results"][-1]["values"] for each in found)
        reason = traces[0].reason or traces[1].reason
        return Step(
            step=step,
            mode="; ".join(mode),
            beginnings=(_begun(orders[0]), _begun(orders[1])),
            same_rows=traces[0].rows == traces[1].rows,
            values={name: (left.get(name), right.get(name)) for name in {**left, **right}},
            tolerance=tolerance,
            before=differences(outs[0] / "before", outs[1] / "before", tolerance),
            outputs=None if reason else compared(*_pair(traces), tolerance),
            gradients=differences(outs[0] / "gradients", outs[1] / "gradients", tolerance),
            after=differences(outs[0] / "after", outs[1] / "after", tolerance),
            reason=reason,
        )


def _pair(traces: list[Traced]) -> tuple[Traced, Traced]:
    return traces[0], traces[1]


def _draws(order: Order) -> tuple[int, ...]:
    """By what the random numbers of a step hang on the layout."""
    degrees = degrees_of(order.config, order.world_size)
    return degrees.dp, degrees.tp, degrees.pp, degrees.cp


def _model(order: Order) -> dict[str, Any]:
    """What a run's model configuration sets above zero of dropout; its own values before those of the run file."""
    from ..train.run.preflight import data_and_model_config

    config = data_and_model_config(order.config)[1].to_dict()
    return {key: config[key] for key in dropouts(config)}


def _begun(order: Order) -> str:
    path = order.beginning.checkpoint
    return "the beginning of the run" if path is None else str(path)

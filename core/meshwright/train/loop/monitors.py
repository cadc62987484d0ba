"""Judge the steps and evaluations of a run: bad steps, early stopping, and the best steps. No torch in this module.

Losses and norms are equal on all ranks, so that ranks need not agree. The state is saved in checkpoints: a resumed run
judges as it would have.

[Note: bad steps] Such a step is skipped, or the run goes back to a checkpoint and leaves out all batches since then, as
was done for PaLM (Chowdhery et al. 2022, arXiv:2204.02311, section 5.1). Distance is measured in median absolute
deviations of the good steps before, which outliers do not move (Iglewicz and Hoaglin 1993).

[Note: draws] The batch of a step, and its random numbers, are drawn by the number of the step plus the number of
batches that rolling back has left out before it.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from ...base.errors import ConfigError, TrainingError
from ...base.validation import FrozenModel
from ...mesh.sizes import Size

if TYPE_CHECKING:
    from ...checkpoint import Checkpointer
    from ...events.step import StepResult

BAD_STEPS_KEY = "bad_steps"
"""Key of their state in that of a loop."""
MIN_GOOD_STEPS = 20
"""Good steps that must be known before one can be far from them."""
MAD_TO_SIGMA = 1.4826
"""Standard deviation of a normal distribution in median absolute deviations."""
MIN_RELATIVE_DEVIATION = 1e-3
"""Least deviation, relative to the median."""


class BadStepConfig(FrozenModel):
    """What becomes of a step whose loss or gradient norm is not finite, or far above those before."""

    action: Literal["stop", "skip", "rollback"] = Field(
        default="stop",
        description="stop: the run ends with an error; skip: the optimizer does not step, and the run goes on; rollback: "
        "the run goes back to its newest checkpoint, and leaves out all batches since then.",
    )
    max_deviations: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        default=None,
        description="Bad is also a loss or norm that is so many standard deviations, told by the median absolute "
        "deviation, above the median of the good steps before; null: only what is not finite.",
    )
    window: Annotated[Size, Field(ge=MIN_GOOD_STEPS)] = Field(default=100, description="How many good steps count.")
    max_bad_steps: Size = Field(
        default=10, description="So many bad steps without a good one that is further end the run."
    )


@dataclass(frozen=True)
class BadStepInfo:
    """A skipped step: its number from 1, and why."""

    step: int
    reason: str


class RollbackRequested(Exception):
    """A bad step takes all ranks back to a checkpoint; its gradients were dropped."""

    def __init__(self, bad: BadStepInfo) -> None:
        super().__init__(bad)
        self.bad = bad


class BadStepDetector:
    """Judges the steps of a run."""

    def __init__(self, config: BadStepConfig, state: Mapping[str, Any] | None = None) -> None:
        known = state or {}
        self.config = config
        self.num_skipped_batches, self.num_bad_steps = int(known.get("left_out", 0)), int(known.get("count", 0))
        self._num_since_good, self._last_good_step = int(known.get("since_good", 0)), int(known.get("furthest", 0))
        self._losses = deque[float](known.get("losses", ()), config.window)
        self._norms = deque[float](known.get("norms", ()), config.window)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds of it; values of JSON."""
        if self.config.action == "stop" and self.config.max_deviations is None and not self.num_skipped_batches:
            return {}
        counts = {"left_out": self.num_skipped_batches, "count": self.num_bad_steps}
        counts |= {"since_good": self._num_since_good, "furthest": self._last_good_step}
        return {BAD_STEPS_KEY: {**counts, "losses": list(self._losses), "norms": list(self._norms)}}

    def check_step(self, step: int, loss: float, norm: float) -> BadStepInfo | None:
        """Judge a step; None if it is good."""
        reason = self._find_reason(loss, norm)
        if reason is not None:
            return self.record_bad_step(step, reason)
        if self.config.max_deviations is not None:
            self._losses.append(loss)
            self._norms.append(norm)
        if step > self._last_good_step:
            self._last_good_step, self._num_since_good = step, 0
        return None

    def record_bad_step(self, step: int, reason: str) -> BadStepInfo:
        """Note a bad step."""
        if self.config.action == "stop":
            raise TrainingError(
                f"step {step}: {reason}. The parameters were not changed by this step. Lower optimizer.lr, lengthen "
                f"schedule.warmup_steps, or look at the step's data; or leave such steps out (on_bad_step: skip)."
            )
        self.num_bad_steps += 1
        self._num_since_good += 1
        if self._num_since_good > self.config.max_bad_steps:
            raise TrainingError(
                f"step {step}: {reason}. There were {self._num_since_good} bad steps without a good one that is further, "
                f"and on_bad_step.limit={self.config.max_bad_steps}. Lower optimizer.lr, look at the data, or raise the limit."
            )
        return BadStepInfo(step, reason)

    def roll_back(self, bad: BadStepInfo, state: Mapping[str, Any], *, step: int) -> None:
        """Go back to the state after step `step`, and leave out the batches since then."""
        self.num_skipped_batches += bad.step - step
        then = BadStepDetector(self.config, state.get(BAD_STEPS_KEY))
        self._losses, self._norms = then._losses, then._norms

    def _find_reason(self, loss: float, norm: float) -> str | None:
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return f"the loss is {loss} and the gradient norm {norm}"
        if self.config.max_deviations is None or len(self._losses) < MIN_GOOD_STEPS:
            return None
        for name, value, known in (("loss", loss, self._losses), ("gradient norm", norm, self._norms)):
            far, median = compute_deviations_above(value, known)
            if far > self.config.max_deviations:
                return (
                    f"the {name} {value:.6g} is {far:.1f} standard deviations above the median {median:.6g} of the "
                    f"{len(known)} good steps before"
                )
        return None


def compute_deviations_above(value: float, history: deque[float]) -> tuple[float, float]:
    """Return how many standard deviations a value lies above the median of others, and that median."""
    median = statistics.median(history)
    spread = MAD_TO_SIGMA * statistics.median(abs(each - median) for each in history)
    least = max(MIN_RELATIVE_DEVIATION * abs(median), math.ulp(0.0))
    return (value - median) / max(spread, least), median


LOOP_STATE_KEY = "loop"
"""Key of what `fit` remembers in `Manifest.extra`."""


@dataclass(frozen=True)
class EarlyStopping:
    """Stop when the loss of a set has not fallen for a while.

    Attributes:
        patience: evaluations in a row without a lower loss after which the run ends.
        min_delta: a loss counts as lower if it is lower by more than this.
    """

    eval_set: str = "held_out"
    patience: int = 3
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        if type(self.patience) is not int or self.patience < 1:
            raise ConfigError(f"patience of early_stopping must be an int, at least 1, not {self.patience!r}.")
        if not 0 <= self.min_delta < math.inf:
            raise ConfigError(f"min_delta of early_stopping must be at least 0 and finite, not {self.min_delta!r}.")


class MetricMonitor:
    """Looks at the evaluations of a run."""

    def __init__(
        self, early_stopping: EarlyStopping | None, checkpointer: Checkpointer | None, state: Mapping[str, Any] | None
    ) -> None:
        self._early_stopping, self._keep_best, self._best_eval_set = early_stopping, 0, ""
        if checkpointer is not None and checkpointer.keep_best:
            self._keep_best, self._best_eval_set = checkpointer.keep_best, checkpointer.best_eval_set
        seen = _state_for_set(state, "early_stopping", "" if early_stopping is None else early_stopping.eval_set)
        self._lowest, self._num_bad_evaluations = seen.get("lowest"), int(seen.get("waited", 0))
        best = _state_for_set(state, "best", self._best_eval_set).get("values", ())
        self._best = sorted((float(value), int(step)) for value, step in best)

    @property
    def should_stop(self) -> bool:
        """Whether the run is to stop."""
        return self._early_stopping is not None and self._num_bad_evaluations >= self._early_stopping.patience

    def update(self, result: StepResult) -> bool:
        """Look at the evaluations of a step, if any, and return whether it is among the best so far."""
        found = result.evaluations
        if self._early_stopping is not None and self._early_stopping.eval_set in found:
            value = found[self._early_stopping.eval_set]
            is_lower = math.isfinite(value) and (
                self._lowest is None or value < self._lowest - self._early_stopping.min_delta
            )
            self._lowest, self._num_bad_evaluations = (
                (value, 0) if is_lower else (self._lowest, self._num_bad_evaluations + 1)
            )
        if self._best_eval_set not in found or not math.isfinite(found[self._best_eval_set]):
            return False
        self._best = sorted([*self._best, (found[self._best_eval_set], result.step)])[: self._keep_best]
        return any(step == result.step for _, step in self._best)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds of it; values of JSON."""
        state: dict[str, Any] = {}
        if self._early_stopping is not None:
            state["early_stopping"] = {
                "set": self._early_stopping.eval_set,
                "lowest": self._lowest,
                "waited": self._num_bad_evaluations,
            }
        if self._keep_best:
            state["best"] = {"set": self._best_eval_set, "values": [list(each) for each in self._best]}
        return state


def _state_for_set(state: Mapping[str, Any] | None, key: str, name: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = (state or {}).get(key) or {}
    return found if found.get("set") == name else {}

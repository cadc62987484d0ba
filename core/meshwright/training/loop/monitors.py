"""Check the steps and evaluations of a run: bad steps, early stopping, and the best steps. Does not import torch.

Losses and norms are equal on all ranks, so no communication is needed. Checkpoints contain the state, so a resumed run
makes the same decisions as an uninterrupted one.

[Note: bad steps] A bad step is skipped, or the run rolls back to a checkpoint and skips all batches since then, as was
done for PaLM (Chowdhery et al. 2022, arXiv:2204.02311, section 5.1). The deviation is measured in median absolute
deviations of the preceding good steps, which are robust to outliers (Iglewicz and Hoaglin 1993).

[Note: draws] The batch and the random numbers of a step are selected by a batch index: the step's index plus the number
of batches that rollbacks have skipped before it.
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
"""Key of the detector's state in the loop's state."""
MIN_GOOD_STEPS = 20
"""Good steps that are needed before a deviation is computed."""
MAD_TO_SIGMA = 1.4826
"""Standard deviation of a normal distribution, in units of its median absolute deviation."""
MIN_RELATIVE_DEVIATION = 1e-3
"""Lower bound of the standard deviation, relative to the median."""


class BadStepConfig(FrozenModel):
    """Handling of a step whose loss or gradient norm is not finite, or far above those of previous steps."""

    action: Literal["stop", "skip", "rollback"] = Field(
        default="stop",
        description="stop: the run ends with an error; skip: the optimizer does not step, and the run continues; "
        "rollback: the run goes back to its newest checkpoint, and leaves out all batches since then.",
    )
    max_deviations: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        default=None,
        description="Bad is also a loss or norm that is so many standard deviations, estimated from the median "
        "absolute "
        "deviation, above the median of the good steps before; null: only what is not finite.",
    )
    window: Annotated[Size, Field(ge=MIN_GOOD_STEPS)] = Field(default=100, description="How many good steps count.")
    max_bad_steps: Size = Field(
        default=10, description="So many bad steps without a good one that is further end the run."
    )


@dataclass(frozen=True)
class BadStepInfo:
    """A bad step: its number, counted from 1, and the reason."""

    step: int
    reason: str


class RollbackRequested(Exception):
    """Raised on all ranks when a bad step triggers a rollback. The step's gradients have been dropped."""

    def __init__(self, bad: BadStepInfo) -> None:
        super().__init__(bad)
        self.bad = bad


class BadStepDetector:
    """Detect bad steps from loss and gradient norm; see [Note: bad steps]."""

    def __init__(self, config: BadStepConfig, state: Mapping[str, Any] | None = None) -> None:
        saved = state or {}
        self.config = config
        self.num_skipped_batches, self.num_bad_steps = int(saved.get("left_out", 0)), int(saved.get("count", 0))
        self._num_since_good, self._last_good_step = int(saved.get("since_good", 0)), int(saved.get("furthest", 0))
        self._losses = deque[float](saved.get("losses", ()), config.window)
        self._norms = deque[float](saved.get("norms", ()), config.window)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for checkpoints; JSON-serializable."""
        if self.config.action == "stop" and self.config.max_deviations is None and not self.num_skipped_batches:
            return {}
        counts = {"left_out": self.num_skipped_batches, "count": self.num_bad_steps}
        counts |= {"since_good": self._num_since_good, "furthest": self._last_good_step}
        return {BAD_STEPS_KEY: {**counts, "losses": list(self._losses), "norms": list(self._norms)}}

    def check_step(self, step: int, loss: float, norm: float) -> BadStepInfo | None:
        """Check a step; return None if it is good."""
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
        """Count a bad step, or raise TrainingError if the action is "stop" or there are too many of them."""
        if self.config.action == "stop":
            raise TrainingError(
                f"step {step}: {reason}. The parameters were not changed by this step. Lower optimizer.lr, lengthen "
                f"schedule.warmup_steps, or look at the step's data; or leave such steps out (on_bad_step: skip)."
            )
        self.num_bad_steps += 1
        self._num_since_good += 1
        if self._num_since_good > self.config.max_bad_steps:
            raise TrainingError(
                f"step {step}: {reason}. There were {self._num_since_good} bad steps without a good one that is "
                f"further, and on_bad_step.max_bad_steps={self.config.max_bad_steps}. Lower optimizer.lr, look at the "
                "data, or raise the limit."
            )
        return BadStepInfo(step, reason)

    def roll_back(self, bad: BadStepInfo, state: Mapping[str, Any], *, step: int) -> None:
        """Restore the state after step `step`, and skip the batches since then."""
        self.num_skipped_batches += bad.step - step
        restored = BadStepDetector(self.config, state.get(BAD_STEPS_KEY))
        self._losses, self._norms = restored._losses, restored._norms

    def _find_reason(self, loss: float, norm: float) -> str | None:
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return f"the loss is {loss} and the gradient norm {norm}"
        if self.config.max_deviations is None or len(self._losses) < MIN_GOOD_STEPS:
            return None
        for name, value, history in (("loss", loss, self._losses), ("gradient norm", norm, self._norms)):
            score, median = compute_deviations_above(value, history)
            if score > self.config.max_deviations:
                return (
                    f"the {name} {value:.6g} is {score:.1f} standard deviations above the median {median:.6g} of the "
                    f"{len(history)} good steps before"
                )
        return None


def compute_deviations_above(value: float, history: deque[float]) -> tuple[float, float]:
    """Return by how many standard deviations `value` exceeds the median of `history`, and that median."""
    median = statistics.median(history)
    spread = MAD_TO_SIGMA * statistics.median(abs(each - median) for each in history)
    least = max(MIN_RELATIVE_DEVIATION * abs(median), math.ulp(0.0))
    return (value - median) / max(spread, least), median


LOOP_STATE_KEY = "loop"
"""Key of the loop's state in `Manifest.extra`."""


@dataclass(frozen=True)
class EarlyStopping:
    """Stop when the loss of an evaluation set has stopped improving.

    Attributes:
        eval_set: name of the evaluation set.
        patience: number of consecutive evaluations without improvement after which the run ends.
        min_delta: the loss must decrease by more than this to count as an improvement.
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
    """Track evaluation losses, for early stopping and for keeping the best checkpoints."""

    def __init__(
        self, early_stopping: EarlyStopping | None, checkpointer: Checkpointer | None, state: Mapping[str, Any] | None
    ) -> None:
        self._early_stopping, self._keep_best, self._best_eval_set = early_stopping, 0, ""
        if checkpointer is not None and checkpointer.keep_best:
            self._keep_best, self._best_eval_set = checkpointer.keep_best, checkpointer.best_eval_set
        stopping_state = _state_for_set(
            state, "early_stopping", "" if early_stopping is None else early_stopping.eval_set
        )
        self._lowest, self._num_bad_evaluations = stopping_state.get("lowest"), int(stopping_state.get("waited", 0))
        best = _state_for_set(state, "best", self._best_eval_set).get("values", ())
        self._best = sorted((float(value), int(step)) for value, step in best)

    @property
    def should_stop(self) -> bool:
        """Whether early stopping has triggered."""
        return self._early_stopping is not None and self._num_bad_evaluations >= self._early_stopping.patience

    def update(self, result: StepResult) -> bool:
        """Record the evaluations of a step, if any, and return whether it is among the best so far."""
        losses = result.evaluations
        if self._early_stopping is not None and self._early_stopping.eval_set in losses:
            value = losses[self._early_stopping.eval_set]
            is_lower = math.isfinite(value) and (
                self._lowest is None or value < self._lowest - self._early_stopping.min_delta
            )
            self._lowest, self._num_bad_evaluations = (
                (value, 0) if is_lower else (self._lowest, self._num_bad_evaluations + 1)
            )
        if self._best_eval_set not in losses or not math.isfinite(losses[self._best_eval_set]):
            return False
        self._best = sorted([*self._best, (losses[self._best_eval_set], result.step)])[: self._keep_best]
        return any(step == result.step for _, step in self._best)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for checkpoints; JSON-serializable."""
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
    saved: Mapping[str, Any] = (state or {}).get(key) or {}
    return saved if saved.get("set") == name else {}

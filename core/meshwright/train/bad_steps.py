"""Steps that are not made: their loss or norm is not finite, or far above what it was. No torch in this module.

[Note: bad steps] A loss or a norm that is not finite would make all parameters so, and one that leaps does harm that
lasts: a broken document, a batch that the model cannot take yet, a flipped bit. Such a step can be left out, or the run
goes back to a checkpoint and leaves out all batches since then, as was done for PaLM (Chowdhery et al. 2022,
arXiv:2204.02311, section 5.1). What is far is told by the median absolute deviation of the good steps before, which
outliers do not move (Iglewicz and Hoaglin 1993).

All of it follows from losses and norms, which are equal on all ranks, so that ranks need not agree. It is remembered in
checkpoints: a run that goes on judges as it would have done.

[Note: draws] The batches of steps are drawn in their order, and with their random numbers, by a number of their own:
that of the step, and of all batches that rewinding has left out before it.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from ..base.errors import TrainingError
from ..base.validation import FrozenModel
from ..mesh.sizes import Size

BAD_STEPS = "bad_steps"
"""Where the state of a loop has what it remembers of them."""
LEAST_KNOWN = 20
"""So many good steps must be known before one can be far from them."""
MAD_TO_SIGMA = 1.4826
"""The standard deviation of a normal distribution, in median absolute deviations."""
LEAST_SPREAD = 1e-3
"""Of values that hardly differ, relative to their median, a deviation is at least this."""


class BadStepConfig(FrozenModel):
    """What becomes of a step whose loss or gradient norm is not finite, or far above those before."""

    do: Literal["stop", "skip", "rewind"] = Field(
        default="stop",
        description="stop: the run ends with an error; skip: the optimizer does not step, and the run goes on; rewind: "
        "the run goes back to its newest checkpoint, and leaves out all batches since then.",
    )
    deviations: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        default=None,
        description="Bad is also a loss or norm that is so many standard deviations, told by the median absolute "
        "deviation, above the median of the good steps before; null: only what is not finite.",
    )
    window: Annotated[Size, Field(ge=LEAST_KNOWN)] = Field(default=100, description="How many good steps count.")
    limit: Size = Field(default=10, description="So many bad steps without a good one that is further end the run.")


@dataclass(frozen=True)
class Bad:
    """A step that is not made: its number from 1, and why."""

    step: int
    reason: str


class Rewinds(Exception):
    """A step is bad, on all ranks, and takes the run back to a checkpoint; its gradients were dropped."""

    def __init__(self, bad: Bad) -> None:
        super().__init__(bad)
        self.bad = bad


class BadSteps:
    """Judges the steps of a run.

    Args:
        config: see `BadStepConfig`.
        state: that an earlier part of the run has left; None: it begins.

    Attributes:
        left_out: batches that rewinding has left out; see [Note: draws].
        count: bad steps so far.
    """

    def __init__(self, config: BadStepConfig, state: Mapping[str, Any] | None = None) -> None:
        known = state or {}
        self.config = config
        self.left_out, self.count = int(known.get("left_out", 0)), int(known.get("count", 0))
        self._since_good, self._furthest = int(known.get("since_good", 0)), int(known.get("furthest", 0))
        self._losses = deque[float](known.get("losses", ()), config.window)
        self._norms = deque[float](known.get("norms", ()), config.window)

    def state(self) -> dict[str, Any]:
        """What the run must remember; values of JSON."""
        if self.config.do == "stop" and self.config.deviations is None and not self.left_out:
            return {}
        counts = {"left_out": self.left_out, "count": self.count}
        counts |= {"since_good": self._since_good, "furthest": self._furthest}
        return {BAD_STEPS: {**counts, "losses": list(self._losses), "norms": list(self._norms)}}

    def judge(self, step: int, loss: float, norm: float) -> Bad | None:
        """Whether a step is bad.

        Raises:
            TrainingError: it is, and ends the run.
        """
        reason = self._reason(loss, norm)
        if reason is not None:
            return self.bad(step, reason)
        if self.config.deviations is not None:
            self._losses.append(loss)
            self._norms.append(norm)
        if step > self._furthest:
            self._furthest, self._since_good = step, 0
        return None

    def bad(self, step: int, reason: str) -> Bad:
        """Note a bad step.

        Raises:
            TrainingError: it ends the run.
        """
        if self.config.do == "stop":
            raise TrainingError(
                f"step {step}: {reason}. The parameters were not changed by this step. Lower optimizer.lr, lengthen "
                f"schedule.warmup_steps, or look at the step's data; or leave such steps out (on_bad_step: skip)."
            )
        self.count += 1
        self._since_good += 1
        if self._since_good > self.config.limit:
            raise TrainingError(
                f"step {step}: {reason}. There were {self._since_good} bad steps without a good one that is further, "
                f"and on_bad_step.limit={self.config.limit}. Lower optimizer.lr, look at the data, or raise the limit."
            )
        return Bad(step, reason)

    def rewound(self, bad: Bad, state: Mapping[str, Any], *, to: int) -> None:
        """Go on as it was when a step ended, without the batches since then.

        Args:
            state: as it was.
            to: the number of that step.
        """
        self.left_out += bad.step - to
        then = BadSteps(self.config, state.get(BAD_STEPS))
        self._losses, self._norms = then._losses, then._norms

    def _reason(self, loss: float, norm: float) -> str | None:
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return f"the loss is {loss} and the gradient norm {norm}"
        if self.config.deviations is None or len(self._losses) < LEAST_KNOWN:
            return None
        for name, value, known in (("loss", loss, self._losses), ("gradient norm", norm, self._norms)):
            far, median = deviations_above(value, known)
            if far > self.config.deviations:
                return (
                    f"the {name} {value:.6g} is {far:.1f} standard deviations above the median {median:.6g} of the "
                    f"{len(known)} good steps before"
                )
        return None


def deviations_above(value: float, known: deque[float]) -> tuple[float, float]:
    """How many standard deviations a value lies above the median of others, and that median."""
    median = statistics.median(known)
    spread = MAD_TO_SIGMA * statistics.median(abs(each - median) for each in known)
    least = max(LEAST_SPREAD * abs(median), math.ulp(0.0))
    return (value - median) / max(spread, least), median

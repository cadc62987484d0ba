"""Numbers of a step as text, for log lines and the progress bar. Imports no torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

from meshwright.plugin import EMA_SUFFIX, StepResult

_MIN_UNSUPERVISED_SHARE = 0.05
"""Share of unsupervised tokens above which both rates are shown. The first token of a row is never supervised."""


@dataclass
class StepFormatter:
    """Format the steps of a run. `num_rows`: rows of an epoch; None: unknown. `has_token_loss`: the loss counts tokens,
    not pairs or sequences."""

    batch_size: int = 1
    num_rows: int | None = None
    has_token_loss: bool = True
    clock: Callable[[], float] = time.monotonic
    _started_at: float = field(default=0.0, init=False)
    _first_step: tuple[int, float] | None = field(default=None, init=False)

    def start(self) -> None:
        self._started_at = self.clock()

    def format_times(self, result: StepResult) -> str:
        """Return the times that this attempt has taken and will take, such as "0:00:12<0:01:30"; ?: unknown."""
        now = self.clock()
        if self._first_step is None or result.step <= self._first_step[0]:
            # The first step is slower than the others.
            self._first_step = result.step, now
        first, at = self._first_step
        remaining = "?"
        if result.step > first:
            remaining = _format_seconds((now - at) / (result.step - first) * (result.num_steps - result.step))
        return f"{_format_seconds(now - self._started_at)}<{remaining}"

    def format_numbers(self, result: StepResult) -> str:
        epochs = ""
        if self.num_rows:
            done, total = (steps * self.batch_size / self.num_rows for steps in (result.step, result.num_steps))
            epochs = f"epoch {done:.2f}/{total:.2f}  "
        return f"{epochs}{format_step(result, has_token_loss=self.has_token_loss)}"


def _format_seconds(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def format_step(result: StepResult, *, has_token_loss: bool = True) -> str:
    text = (
        f"loss {result.loss:.6f}  norm {result.grad_norm:.3f}  lr {result.learning_rate:.2e}  "
        f"{_format_rates(result, has_token_loss=has_token_loss)}"
    )
    if result.mfu is not None:
        text += f"  MFU {result.mfu:.1%}"
    losses = (f"{format_eval_set(name)} {value:.6f}" for name, value in result.evaluations.items())
    sums = (f"{name} {value / result.num_tokens:.4g}" for name, value in result.sums.items())
    return "  ".join([text, *losses, *sums])


def _format_rates(result: StepResult, *, has_token_loss: bool) -> str:
    supervised, count = result.tokens_per_second, result.num_input_tokens
    if count is None:
        return f"{supervised:,.0f} tokens/s"
    both = has_token_loss and result.num_tokens < (1 - _MIN_UNSUPERVISED_SHARE) * count
    return f"{count / result.seconds:,.0f} tokens/s{f' ({supervised:,.0f} supervised)' if both else ''}"


def format_eval_set(name: str) -> str:
    """Return the display name of an evaluation set."""
    base, suffix = (name.removesuffix(EMA_SUFFIX), " (ema)") if name.endswith(EMA_SUFFIX) else (name, "")
    return f"{'held-out' if base == 'held_out' else base}{suffix}"

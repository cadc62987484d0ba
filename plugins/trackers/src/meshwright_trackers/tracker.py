"""Base class of trackers, the names of metrics, and a thread that sends values.

[Note: names of metrics] Values are those of metrics.jsonl; steps are numbered from 1:
    train/      loss, grad_norm, learning_rate, learning_rate/GROUP if there are several, tokens, flops
    eval/SET    losses of the evaluation sets, in steps that evaluate
    sum/NAME    extra sums of an objective
    speed/      tokens_per_second, tokens_per_second_per_device, mfu
    time/step   seconds of the step; time/PART of its parts
    memory/KIND bytes of the first rank
    norm/BLOCK  gradient norms by block, in steps that measure them
    checkpoint/ seconds, is_best, in steps that save
"""

from __future__ import annotations

import json
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from meshwright.plugin import EndReason, Fault, RunInfo, RunSummary, SavedCheckpoint, StepResult, hookimpl

PlainValue = str | int | float | bool | None


def collect_step_metrics(result: StepResult) -> dict[str, float]:
    """Return the metrics of a step; see [Note: names of metrics]. Unknown values are left out."""
    rates = result.learning_rates if len(result.learning_rates) > 1 else {}
    found: dict[str, float | None] = {
        "train/loss": result.loss,
        "train/grad_norm": result.grad_norm,
        "train/learning_rate": result.learning_rate,
        **_add_prefix("train/learning_rate", rates),
        "train/tokens": result.num_tokens,
        "train/flops": result.flops,
        **_add_prefix("eval", result.evaluations),
        **_add_prefix("sum", result.sums),
        "speed/tokens_per_second": result.tokens_per_second,
        "speed/tokens_per_second_per_device": result.tokens_per_second_per_device,
        "speed/mfu": result.mfu,
        "time/step": result.seconds,
        **_add_prefix("time", result.times),
        **_add_prefix("memory", result.memory),
        **_add_prefix("norm", result.block_grad_norms),
    }
    return {name: float(value) for name, value in found.items() if value is not None}


def collect_checkpoint_metrics(checkpoint: SavedCheckpoint) -> dict[str, float]:
    return {"checkpoint/seconds": checkpoint.seconds, "checkpoint/is_best": float(checkpoint.is_best)}


def flatten_parameters(run: RunInfo) -> dict[str, PlainValue]:
    """Return the options of the run file, with dotted keys, and facts of the run under `run.`.

    The options of trackers are left out, since they may contain secrets."""
    facts: dict[str, PlainValue] = {
        "id": run.id,
        "strategy": run.strategy,
        "mesh": run.mesh,
        "world_size": run.world_size,
        "parameters": run.num_parameters,
        "device": run.device,
        "version": run.version,
    }
    options = {name: value for name, value in run.config.items() if name != "trackers"}
    return {**dict(_flatten(options)), **{f"run.{name}": value for name, value in facts.items()}}


def summarize_end(summary: RunSummary) -> dict[str, str | float]:
    return {"end/reason": summary.reason, "end/step": summary.step, "end/seconds": summary.seconds}


def _add_prefix(prefix: str, values: Mapping[str, float]) -> dict[str, float]:
    return {f"{prefix}/{name}": value for name, value in values.items()}


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, PlainValue]]:
    """Yield values with dotted keys. Lists of mappings get numbers as keys; other lists become JSON."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, list | tuple) and any(isinstance(each, Mapping) for each in value):
            value = dict(enumerate(value))
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{name}.")
        elif value is None or isinstance(value, str | int | float):
            yield name, value
        else:
            yield name, json.dumps(value, default=str)


class Tracker(ABC):
    """Base class of trackers: observers on the first rank. The constructor opens or resumes the library's run."""

    _has_ended = False

    @abstractmethod
    def log(self, values: Mapping[str, float], *, step: int, end_time: float) -> None:
        """Log values of a step by name, possibly infinite or NaN. `end_time` is their time [s since 1970]."""

    @abstractmethod
    def log_text(self, name: str, text: str, *, step: int) -> None:
        """Log a text. A tracker may keep only the last text of a name."""

    @abstractmethod
    def finish(self, reason: EndReason, facts: Mapping[str, str | float]) -> None:
        """Log the reason for the end of the run, and send or store all values."""

    def close(self) -> None:
        """End the run as failed if its end was not reported."""
        if not self._has_ended:
            self._has_ended = True
            self.finish("failed", {})

    @hookimpl
    def on_step_end(self, result: StepResult) -> None:
        self.log(collect_step_metrics(result), step=result.step, end_time=result.end_time)

    @hookimpl
    def on_checkpoint(self, checkpoint: SavedCheckpoint) -> None:
        self.log(collect_checkpoint_metrics(checkpoint), step=checkpoint.step, end_time=time.time())
        self.log_text("checkpoint/last", str(checkpoint.path), step=checkpoint.step)
        if checkpoint.is_best:
            self.log_text("checkpoint/best", str(checkpoint.path), step=checkpoint.step)

    @hookimpl
    def on_fault(self, fault: Fault) -> None:
        self.log_text("fault", f"{fault.error_type}: {fault.message}", step=fault.step)

    @hookimpl
    def on_run_end(self, summary: RunSummary) -> None:
        self._has_ended = True
        self.finish(summary.reason, summarize_end(summary))


ItemT = TypeVar("ItemT")


class BackgroundSender(Generic[ItemT]):
    """Send items in order in a thread, so that a server does not delay the run.

    The next `put` or `finish` raises the thread's error.
    """

    def __init__(self, send: Callable[[Sequence[ItemT]], None], *, name: str) -> None:
        self._send = send
        self._queue: list[ItemT] = []
        self._condition = threading.Condition()
        self._is_finishing = False
        self._error: Exception | None = None
        self._has_failed = False
        # A daemon thread, so that a hanging send does not keep the process alive.
        self._thread = threading.Thread(target=self._send_loop, name=name, daemon=True)
        self._thread.start()

    def put(self, *items: ItemT) -> None:
        """Add items. If sending earlier ones failed, raise the error once, and afterwards send nothing."""
        with self._condition:
            self._raise_error()
            if self._has_failed:
                return
            self._queue += items
            self._condition.notify()

    def finish(self, timeout_s: float) -> None:
        """Wait until all items are sent. Raise errors as `put` does, or TimeoutError."""
        with self._condition:
            self._is_finishing = True
            self._condition.notify()
        self._thread.join(timeout_s)
        with self._condition:
            self._raise_error()
            if self._thread.is_alive():
                raise TimeoutError(f"the last values were not sent within {timeout_s:g} s")

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _send_loop(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._queue or self._is_finishing)
                items, self._queue = self._queue, []
            if not items:
                return
            try:
                self._send(items)
            except Exception as error:
                with self._condition:
                    self._error, self._has_failed = error, True
                return

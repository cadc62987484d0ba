"""What all trackers share: the names of metrics, the observer of a run, and a thread that sends.

[Note: names of metrics] Values are those of metrics.jsonl, and steps are the run's, from 1:
    train/      loss, grad_norm, learning_rate, learning_rate/GROUP where there are several, tokens, flops
    eval/SET    losses of the sets, in steps that evaluate
    sum/NAME    further sums of an objective
    speed/      tokens_per_second, tokens_per_second_per_device, mfu
    time/step   seconds of the step; time/PART its parts
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
    """The numbers of a step; see [Note: names of metrics]. What is not known is left out."""
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
    """The run file with dots in its keys, without its trackers, which may hold secrets; and `run.` what it became."""
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
    """Lists are numbered where they hold mappings, and else are JSON."""
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
    """An observer on the first rank of a run, whose constructor opens or resumes the run of its library."""

    _has_ended = False

    @abstractmethod
    def log(self, values: Mapping[str, float], *, step: int, end_time: float) -> None:
        """Log numbers of a step by name, possibly infinite or NaN, known at `end_time` [s since 1970]."""

    @abstractmethod
    def log_text(self, name: str, text: str, *, step: int) -> None:
        """Log a text; the last one of a name matters most."""

    @abstractmethod
    def finish(self, reason: EndReason, facts: Mapping[str, str | float]) -> None:
        """Log how the run has ended, and store everything."""

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
    """Sends all waiting items in order, in a thread, so that no server delays the run; the next `put` or `finish`
    raises errors.
    """

    def __init__(self, send: Callable[[Sequence[ItemT]], None], *, name: str) -> None:
        self._send = send
        self._queue: list[ItemT] = []
        self._condition = threading.Condition()
        self._is_finishing = False
        self._error: Exception | None = None
        self._has_failed = False
        # A daemon, so that a hanging send does not keep the process from ending.
        self._thread = threading.Thread(target=self._send_loop, name=name, daemon=True)
        self._thread.start()

    def put(self, *items: ItemT) -> None:
        """Add items. Raises the error of sending earlier ones, once; after that nothing is sent."""
        with self._condition:
            self._raise_error()
            if self._has_failed:
                return
            self._queue += items
            self._condition.notify()

    def finish(self, timeout_s: float) -> None:
        """Wait until everything is sent. Raises as `put`, or TimeoutError."""
        with self._condition:
            self._is_finishing = True
            self._condition.notify()
        self._thread.join(timeout_s)
        with self._condition:
            self._raise_error()
            if self._thread.is_alive():
                raise TimeoutError(f"what was logged last has not been taken after {timeout_s:g} s")

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

"""Report a run: a progress bar or log lines, and a JSONL file of all steps. Imports no torch."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from meshwright.plugin import (
    BadStep,
    StepResult,
    Stopped,
    TrainingError,
    create_console,
    hookimpl,
    open_for_append,
    parse_json,
    warn,
    write_atomically,
)

from .run_directory import RunDirectory
from .step_text import StepFormatter

_RATES = ("tokens_per_second", "tokens_per_second_per_device")
NONDETERMINISTIC_FIELDS = frozenset(
    ("seconds", *_RATES, "time", "times", "memory", "world_size", "peak_flops", "mfu", "stragglers")
)
"""Keys that depend on clocks and hardware. All others are equal if a run is repeated, on any number of ranks."""
_MAPPING_KEYS = {
    **{name: name for name in ("sums", "evaluations", "times", "learning_rates")},
    "block_grad_norms": "norms",
    "memory": "memory",
}
"""Fields of a StepResult that are mappings, and their keys in a line."""
_PLAIN_FIELDS = (
    "step",
    "loss",
    "grad_norm",
    "learning_rate",
    "num_tokens",
    "num_input_tokens",
    "seconds",
    "world_size",
    "flops",
    "peak_flops",
)
_NUMBER_KEYS = {**{name: name for name in _PLAIN_FIELDS}, "end_time": "time"}
"""Fields of a StepResult that are numbers, and their keys in a line."""
_BAR_WIDTH = 12
_MAX_LISTED_LINES = 5
"""Maximum number of unreadable lines that a warning lists."""


class MetricsReporter:
    """Observer on rank 0 that prints progress and writes the metrics file. A context manager."""

    def __init__(
        self,
        metrics: Path,
        *,
        log_every: int,
        console: Console,
        previous_results: Sequence[StepResult] = (),
        on_error: Literal["stop", "continue"] = "stop",
        formatter: StepFormatter | None = None,
    ) -> None:
        self._formatter = formatter or StepFormatter()
        self._previous_results, self._on_error = previous_results, on_error
        self._metrics, self._log_every, self._console = metrics, log_every, console
        self._lines: LineWriter | None = None
        self._has_warned = False
        # On a narrow terminal, the end of the numbers is cut off, not the times.
        numbers = TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1))
        times = (TimeElapsedColumn(), TextColumn("<"), TimeRemainingColumn())
        columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(_BAR_WIDTH), *times, numbers)
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal, expand=True)
        self._task = self._progress.add_task("", total=None)
        self._stragglers = StragglerFilter()

    def __enter__(self) -> MetricsReporter:
        self._lines = _open_with_results(self._metrics, self._previous_results)
        self._formatter.start()
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        if self._lines is not None:
            self._lines.close()

    @hookimpl
    def on_step_end(self, result: StepResult) -> None:
        if self._lines is not None and (error := self._lines.append(_format_line(result))) is not None:
            self._handle_write_error(error)
        for each in self._stragglers.select_new(result):
            print_text(
                f"step {result.step}: rank {each['rank']} is a straggler: it is busy for {each['seconds']:.3g} s of a "
                f"step, the median rank for {each['median']:.3g} s",
                self._console,
            )
        if result.skip_reason:
            return
        text, times = self._formatter.format_numbers(result), self._formatter.format_times(result)
        if self._console.is_terminal:
            self._progress.update(self._task, completed=result.step, total=result.num_steps, description=text)
        elif result.step % self._log_every == 0 or result.step in (1, result.num_steps) or result.evaluations:
            print_text(f"step {result.step}/{result.num_steps}  {times}  {text}", self._console)

    @hookimpl
    def on_bad_step(self, bad_step: BadStep) -> None:
        if bad_step.rollback_step is None:
            text = f"step {bad_step.step} is skipped: {bad_step.reason}"
        else:
            text = (
                f"step {bad_step.step}: {bad_step.reason}; rolling back to step {bad_step.rollback_step}, skipping "
                "the batches since then"
            )
            if self._lines is not None:
                self._lines.close()
                kept = read_metrics(self._metrics, last_step=bad_step.rollback_step, num_steps=bad_step.num_steps)
                self._lines = _open_with_results(self._metrics, kept)
        print_text(f"{text} ({bad_step.num_bad_steps} so far)", self._console)

    def _handle_write_error(self, error: OSError) -> None:
        message = f"{self._metrics} cannot be written: {error}."
        if self._on_error == "stop":
            raise TrainingError(
                f"{message} Free disk space and run the same command again, or set checkpoint.on_error=continue."
            )
        if not self._has_warned:
            self._has_warned = True
            warn(f"{message} Training continues (checkpoint.on_error=continue).", stacklevel=3)


def _open_with_results(metrics: Path, results: Sequence[StepResult]) -> LineWriter:
    """Replace the file atomically by the lines of `results`, and open it to append more."""
    write_atomically(metrics, "".join(_format_line(result) for result in results))
    return LineWriter(metrics)


class LineWriter:
    """File to which complete lines are appended. Lines that could not be written are retried before the next ones."""

    def __init__(self, path: Path) -> None:
        self._file = open_for_append(path)
        self._size = os.fstat(self._file).st_size
        self._pending = b""

    def append(self, text: str) -> OSError | None:
        """Append lines; return the error if they could not be written."""
        self._pending += text.encode()
        rest = memoryview(self._pending)
        try:
            if os.fstat(self._file).st_size != self._size:
                # The last attempt wrote part of a line.
                os.ftruncate(self._file, self._size)
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError as error:
            return error
        self._size += len(self._pending)
        self._pending = b""
        return None

    def close(self) -> None:
        os.close(self._file)


class StragglerFilter:
    def __init__(self) -> None:
        self._reported_ranks: set[float] = set()

    def select_new(self, result: StepResult) -> list[Mapping[str, float]]:
        new = [each for each in result.stragglers if each["rank"] not in self._reported_ranks]
        self._reported_ranks |= {each["rank"] for each in new}
        return new


def read_metrics(path: Path, *, last_step: int, num_steps: int) -> list[StepResult]:
    """Read a run's metrics file up to step `last_step`; `num_steps` is the length of the run.

    After a rollback in the file, later lines replace earlier ones. An unreadable line is skipped with a warning. The
    last line is skipped without one, since a killed run may leave it incomplete.
    """
    return parse_metrics(path.read_bytes(), path, last_step=last_step, num_steps=num_steps) if path.is_file() else []


def parse_metrics(content: bytes, path: Path | str, *, last_step: int, num_steps: int) -> list[StepResult]:
    found: list[StepResult] = []
    unread: list[int] = []
    lines = content.splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            result = _parse_line(line, num_steps)
        except (ValueError, TypeError, KeyError):
            unread += [number] if number < len(lines) else []
            continue
        while found and found[-1].step >= result.step:
            found.pop()
        if result.step <= last_step:
            found.append(result)
    if unread:
        listed = ", ".join(map(str, unread[:_MAX_LISTED_LINES])) + (", ..." if len(unread) > _MAX_LISTED_LINES else "")
        warn(f"{path}: {len(unread)} lines cannot be read and are skipped: {listed}.", stacklevel=2)
    return found


def _parse_line(line: bytes, num_steps: int) -> StepResult:
    """Parse one line. Raises ValueError, TypeError or KeyError if it does not hold the numbers of a step."""
    record = parse_json(line.decode())
    if not isinstance(record, dict):
        raise ValueError("not a record")
    mappings = {name: _none_to_nan(record.get(key, {})) for name, key in _MAPPING_KEYS.items()}
    slow = tuple(_none_to_nan(each) for each in record.get("stragglers", ()))
    numbers = {name: record[key] for name, key in _NUMBER_KEYS.items() if key in record}
    skipped = record.get("skip_reason", "")
    if skipped and isinstance(skipped, str):
        numbers |= _none_to_nan({name: numbers[name] for name in ("loss", "grad_norm")})
    every = [value for values in (numbers, *slow, *mappings.values()) for value in values.values()]
    if not all(type(value) in (int, float) for value in every):
        raise ValueError("a value is not a number")
    if type(numbers["step"]) is not int:
        raise ValueError("step is not an integer")
    numbers |= {"skip_reason": str(skipped), "stragglers": slow, "num_steps": num_steps, "rank": 0}
    return StepResult(**{**numbers, **mappings})


def _none_to_nan(values: Any) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise TypeError("not a record")
    return {name: math.nan if value is None else value for name, value in values.items()}


def nan_to_none(values: Mapping[str, float]) -> dict[str, Any]:
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def _format_line(result: StepResult) -> str:
    return json.dumps(to_record(result)) + "\n"


def to_record(result: StepResult) -> dict[str, Any]:
    record: dict[str, Any] = {
        "step": result.step,
        **nan_to_none({"loss": result.loss, "grad_norm": result.grad_norm}),
        **{name: getattr(result, name) for name in ("learning_rate", "num_tokens", *_RATES, "seconds")},
        "time": result.end_time,
        "world_size": result.world_size,
    }
    for name, key in _MAPPING_KEYS.items():
        if values := getattr(result, name):
            record[key] = nan_to_none(values)
    if result.skip_reason:
        record["skip_reason"] = result.skip_reason
    if result.stragglers:
        record["stragglers"] = [nan_to_none(each) for each in result.stragglers]
    if "held_out" in result.evaluations:
        record["held_out_loss"] = record["evaluations"]["held_out"]
    for name in ("num_input_tokens", "flops", "peak_flops", "mfu"):
        if (value := getattr(result, name)) is not None:
            record[name] = value
    return record


def print_finished(directory: RunDirectory) -> None:
    print_text(
        f"this run has finished: {directory.summary} exists, and the run file is the same. Nothing was done. Raise "
        f"steps to continue (or, if it stopped early, the patience of eval.early_stopping), or set resume=never and "
        f"overwrite=true to train again."
    )


def print_stopped(stopped: Stopped, *, num_steps: int) -> None:
    saved = "saved; the same command continues" if stopped.saved else "which could not be saved"
    if stopped.has_skipped_save:
        saved = (
            "not saved: that would take longer than the rest of checkpoint.on_signal.grace_s; the same command "
            "continues from the newest checkpoint"
        )
    if not stopped.step:
        saved = "so there is nothing to save"
    print_text(f"stopped by {stopped.signal} after step {stopped.step} of {num_steps}, {saved}")


def print_text(text: str | Text, console: Console | None = None) -> None:
    (console or create_console()).print(text, highlight=False, soft_wrap=True)

"""Report a run to people: a progress bar or lines, and a JSONL file of every step. No torch in this module."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from ...base.errors import TrainingError
from ...base.stopping import Stopped
from ...events.run import BadStep
from ...events.step import StepResult
from ...files.parsing import parse_json
from ...files.terminal import new_console, warn
from ...files.writing import open_to_append, write_whole
from ...optim.config import AVERAGED
from ...strategy.hooks import hookimpl
from .run_directory import RunDirectory

MEASURED = frozenset(
    {
        *("seconds", "tokens_per_second", "tokens_per_second_per_device", "time", "times"),
        *("memory", "world_size", "peak_flops", "mfu", "stragglers"),
    }
)
"""Keys that depend on clocks and machines. The others are equal when a run is repeated, on other ranks too."""
_MAPPINGS = ("sums", "evaluations", "times", "learning_rates", "norms", "memory")
_PLAIN = ("step", "loss", "grad_norm", "learning_rate", "num_tokens", "seconds", "world_size", "flops", "peak_flops")
_NUMBERS = {**{name: name for name in _PLAIN}, "ended": "time"}
"""Fields of a StepResult that are numbers, and their keys in a line."""
_TOLD = 5
"""Unreadable lines that are named."""


class Reporter:
    """Observer of steps on the first rank; a context manager.

    Args:
        metrics: path of the JSONL file.
        log_every: steps between lines where the console is no terminal.
        earlier: steps of the run before it was interrupted, which the file begins with.
        on_error: when the file cannot be written, stop the run; or warn once and write the lines when it can be again.

    Raises:
        TrainingError: in a step, if `on_error` is "stop".
    """

    def __init__(
        self,
        metrics: Path,
        *,
        log_every: int,
        console: Console,
        earlier: Sequence[StepResult] = (),
        on_error: Literal["stop", "continue"] = "stop",
    ) -> None:
        self._earlier, self._on_error = earlier, on_error
        self._metrics = metrics
        self._log_every = log_every
        self._console = console
        self._lines: Lines | None = None
        self._has_told = False
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("", total=None)
        self._stragglers = NewStragglers()

    def __enter__(self) -> Reporter:
        self._lines = _begun_with(self._metrics, self._earlier)
        self._progress.start()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()
        if self._lines is not None:
            self._lines.close()

    @hookimpl
    def on_step_end(self, result: StepResult) -> None:
        error = self._lines.add(_line(result)) if self._lines is not None else None
        if error is not None:
            self._tell(error)
        for each in self._stragglers.of(result):
            told = (
                f"step {result.step}: rank {each['rank']} is a straggler: {each['seconds']:.3g} s of a step are its "
                f"own, {each['median']:.3g} s of the median rank"
            )
            show(told, self._console)
        if result.skipped:
            return
        text = describe(result)
        if self._console.is_terminal:
            self._progress.update(self._task, completed=result.step, total=result.steps, description=text)
        elif result.step % self._log_every == 0 or result.step in (1, result.steps):
            show(f"step {result.step}/{result.steps}  {text}", self._console)

    @hookimpl
    def on_bad_step(self, bad: BadStep) -> None:
        if bad.back_to is None:
            text = f"step {bad.step} is left out: {bad.reason}"
        else:
            text = f"step {bad.step}: {bad.reason}; going back to step {bad.back_to}, without the batches since then"
            self._go_back(bad.back_to, bad.steps)
        show(f"{text} ({bad.count} so far)", self._console)

    def _go_back(self, step: int, steps: int) -> None:
        if self._lines is not None:
            self._lines.close()
            self._lines = _begun_with(self._metrics, read_metrics(self._metrics, until=step, steps=steps))

    def _tell(self, error: OSError) -> None:
        told = f"{self._metrics} cannot be written: {error}."
        if self._on_error == "stop":
            raise TrainingError(f"{told} Make room, and start the same command again; or checkpoint.on_error=continue.")
        if not self._has_told:
            self._has_told = True
            warn(f"{told} Training goes on (checkpoint.on_error=continue).", stacklevel=3)


def _begun_with(metrics: Path, results: Sequence[StepResult]) -> Lines:
    """Open the file with the lines of some steps; what is there stays until it is replaced as a whole."""
    write_whole(metrics, "".join(_line(result) for result in results))
    return Lines(metrics)


class Lines:
    """A file that grows by whole lines. Lines that the disk does not take are kept, and written before the next ones.

    Args:
        path: its content stays. Nobody else writes to it.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._file = open_to_append(path)
        self._size = os.fstat(self._file).st_size
        self._rest = b""

    def add(self, text: str) -> OSError | None:
        """Add lines; returns why they have to wait, if they have to."""
        self._rest += text.encode()
        rest = memoryview(self._rest)
        try:
            if os.fstat(self._file).st_size != self._size:
                # A part of a line, from the last time.
                os.ftruncate(self._file, self._size)
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError as error:
            return error
        self._size += len(self._rest)
        self._rest = b""
        return None

    def close(self) -> None:
        os.close(self._file)


class NewStragglers:
    """Returns each straggler once."""

    def __init__(self) -> None:
        self._known: set[float] = set()

    def of(self, result: StepResult) -> list[Mapping[str, float]]:
        new = [each for each in result.stragglers if each["rank"] not in self._known]
        self._known |= {each["rank"] for each in new}
        return new


def read_metrics(path: Path, *, until: int, steps: int) -> list[StepResult]:
    """Read the first `until` steps of a file of metrics of a run of `steps` steps.

    Where the file goes back to an earlier step, what follows replaces what was there from that step on. A line that
    cannot be read is left out with a warning, unless it is the last, which a killed run may leave incomplete.
    """
    return metrics_of(path.read_bytes(), path, until=until, steps=steps) if path.is_file() else []


def metrics_of(content: bytes, path: Path | str, *, until: int, steps: int) -> list[StepResult]:
    """Read the content of a file of metrics; see `read_metrics`."""
    found: list[StepResult] = []
    unread: list[int] = []
    lines = content.splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            result = _read_line(line, steps)
        except (ValueError, TypeError, KeyError):
            unread += [number] if number < len(lines) else []
            continue
        while found and found[-1].step >= result.step:
            found.pop()
        if result.step <= until:
            found.append(result)
    if unread:
        some = ", ".join(map(str, unread[:_TOLD])) + (", ..." if len(unread) > _TOLD else "")
        warn(f"{path}: {len(unread)} lines cannot be read and are left out: {some}.", stacklevel=2)
    return found


def _read_line(line: bytes, steps: int) -> StepResult:
    """ValueError, TypeError or KeyError: it does not hold the numbers of a step."""
    record = parse_json(line.decode())
    if not isinstance(record, dict):
        raise ValueError("no record")
    mappings = {name: _with_nan(record.get(name, {})) for name in _MAPPINGS}
    slow = tuple(_with_nan(each) for each in record.get("stragglers", ()))
    numbers = {name: record[key] for name, key in _NUMBERS.items() if key in record}
    skipped = record.get("skipped", "")
    if skipped and isinstance(skipped, str):
        numbers |= _with_nan({name: numbers[name] for name in ("loss", "grad_norm")})
    every = [value for values in (numbers, *slow, *mappings.values()) for value in values.values()]
    if not all(type(value) in (int, float) for value in every):
        raise ValueError("no numbers of a step")
    if type(numbers["step"]) is not int:
        raise ValueError("no number of a step")
    told = {"skipped": str(skipped), "stragglers": slow}
    return StepResult(**{**numbers, **mappings, **told, "steps": steps, "rank": 0})


def _with_nan(values: Any) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise TypeError("no record")
    return {name: math.nan if value is None else value for name, value in values.items()}


def without_nan(values: Mapping[str, float]) -> dict[str, Any]:
    """Replace values that JSON has no number for by None."""
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def _line(result: StepResult) -> str:
    return json.dumps(as_record(result)) + "\n"


def as_record(result: StepResult) -> dict[str, Any]:
    """Return a line of the metrics file."""
    record: dict[str, Any] = {
        "step": result.step,
        **without_nan({"loss": result.loss, "grad_norm": result.grad_norm}),
        "learning_rate": result.learning_rate,
        "num_tokens": result.num_tokens,
        "tokens_per_second": result.tokens_per_second,
        "tokens_per_second_per_device": result.tokens_per_second_per_device,
        "seconds": result.seconds,
        "time": result.ended,
        "world_size": result.world_size,
    }
    for name in _MAPPINGS:
        if values := getattr(result, name):
            record[name] = without_nan(values)
    if result.skipped:
        record["skipped"] = result.skipped
    if result.stragglers:
        record["stragglers"] = [without_nan(each) for each in result.stragglers]
    if "held_out" in result.evaluations:
        record["held_out_loss"] = record["evaluations"]["held_out"]
    for name in ("flops", "peak_flops", "mfu"):
        if (value := getattr(result, name)) is not None:
            record[name] = value
    return record


def describe(result: StepResult) -> str:
    """Describe a step in one short line."""
    text = (
        f"loss {result.loss:.6f}  norm {result.grad_norm:.3f}  lr {result.learning_rate:.2e}  "
        f"{result.tokens_per_second:,.0f} tokens/s"
    )
    if result.mfu is not None:
        text += f"  MFU {result.mfu:.1%}"
    losses = (f"{shown(name)} {value:.6f}" for name, value in result.evaluations.items())
    return "  ".join(
        [text, *losses, *(f"{name} {value / result.num_tokens:.4g}" for name, value in result.sums.items())]
    )


def shown(name: str) -> str:
    """Return what people call an evaluation set."""
    of, suffix = (name.removesuffix(AVERAGED), " (ema)") if name.endswith(AVERAGED) else (name, "")
    return f"{'held-out' if of == 'held_out' else of}{suffix}"


def say_finished(directory: RunDirectory) -> None:
    show(
        f"this run has finished: {directory.summary} is there, with the same run file. Nothing was "
        f"done. Raise steps to go on (or, if it has stopped early, the patience of eval.early_stopping), or set "
        f"resume=never and overwrite=true to train anew."
    )


def say_stopped(stopped: Stopped, *, steps: int) -> None:
    """Say that a signal has ended a run of `steps` steps."""
    saved = "saved; the same command goes on" if stopped.saved else "which could not be saved"
    if stopped.too_late:
        saved = (
            "not saved: that would take longer than is left of checkpoint.on_signal.grace_s; the same command goes on "
            "from the newest checkpoint"
        )
    if not stopped.step:
        saved = "so there is nothing to save"
    show(f"stopped by {stopped.signal} after step {stopped.step} of {steps}, {saved}")


def show(text: str | Text, console: Console | None = None) -> None:
    """Print text as it is."""
    (console or new_console()).print(text, highlight=False, soft_wrap=True)

"""Log files of a run: events of all attempts (`events.jsonl`), times and memory of each rank, timelines, and hangs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from meshwright.plugin import (
    BadStep,
    CollectiveCounts,
    Evaluation,
    Fault,
    Hang,
    HeartbeatRecord,
    RunInfo,
    RunSummary,
    SavedCheckpoint,
    StepResult,
    StrategyManager,
    append_text,
    generate_run_id,
    hookimpl,
    open_regular_file,
    parse_json,
    warn,
    write_atomically,
)

from .metrics_report import StragglerFilter, nan_to_none
from .run_directory import RunDirectory

if TYPE_CHECKING:
    from .profile.recorder import FaultFileWriter

_MAX_LINE_BYTES = 1 << 20
"""Maximum bytes of a line that are read."""


def get_run_id(events_path: Path) -> str:
    """Return the run id in an events file, or a new one if there is none."""
    try:
        with open_regular_file(events_path) as file:
            known = parse_json(file.readline(_MAX_LINE_BYTES).decode())["id"]
    except (OSError, ValueError, KeyError, TypeError):
        return generate_run_id()
    return known if isinstance(known, str) and known else generate_run_id()


def log_event(events_path: Path, event: str, **values: Any) -> None:
    """Append an event to a file. A write error causes a warning, and does not end the run."""
    EventLog(events_path).log(event, **values)


class EventLog:
    """Observer on rank 0 that appends events to a file. Only the first write error causes a warning."""

    def __init__(self, events_path: Path) -> None:
        self._path = events_path
        self._has_warned = False
        self._stragglers = StragglerFilter()

    def log(self, event: str, **values: Any) -> None:
        """Append an event, unless a write error occurs."""
        try:
            append_text(self._path, json.dumps({"time": time.time(), "event": event, **values}, default=str) + "\n")
        except OSError as error:
            if not self._has_warned:
                warn(f"{self._path} cannot be written: {error}. The run continues.", stacklevel=2)
            self._has_warned = True

    @hookimpl
    def on_run_start(self, run: RunInfo) -> None:
        hidden = ("config", "directory", "rank")
        self.log("start", **{name: value for name, value in vars(run).items() if name not in hidden})

    @hookimpl
    def on_step_end(self, result: StepResult) -> None:
        for each in self._stragglers.select_new(result):
            self.log("straggler", step=result.step, **nan_to_none(each))

    @hookimpl
    def on_evaluation(self, evaluation: Evaluation) -> None:
        self.log("evaluation", **{**asdict(evaluation), "losses": nan_to_none(evaluation.losses)})

    @hookimpl
    def on_bad_step(self, bad_step: BadStep) -> None:
        self.log("bad_step", **asdict(bad_step))

    @hookimpl
    def on_checkpoint(self, checkpoint: SavedCheckpoint) -> None:
        self.log("checkpoint", **asdict(checkpoint))

    @hookimpl
    def on_fault(self, fault: Fault) -> None:
        self.log("fault", **asdict(fault))

    @hookimpl
    def on_run_end(self, summary: RunSummary) -> None:
        values = {**vars(summary), "evaluations": nan_to_none(summary.evaluations)}
        del values["run"]
        self.log("end", **values)


class HangFileReporter:
    """Record a hang on one rank; see `meshwright.mesh.progress.HangReporter`. `fault_files` returns the writer of a
    rank's fault files."""

    def __init__(self, directory: RunDirectory, rank: int, fault_files: Callable[[int], FaultFileWriter]) -> None:
        self._directory, self._rank, self._fault_files = directory, rank, fault_files
        self.location = str(directory.faults)

    def dump_stacks(self, heartbeat: HeartbeatRecord) -> CollectiveCounts:
        text = f"step {heartbeat.phase.step}, phase {heartbeat.phase.name}, at {heartbeat.location}"
        fault = Fault(heartbeat.phase.step, self._rank, "Hang", text, time.time())
        return self._fault_files(self._rank).write(fault, cpp_stacks=False)

    def report(self, hang: Hang) -> None:
        for rank in hang.ranks:
            at: dict[str, Any] = {"process": None, "since": hang.since_s, "is_silent": hang.is_silent}
            if (record := hang.heartbeats.get(rank)) is not None:
                at |= {
                    "step": record.phase.step,
                    "phase": record.phase.name,
                    "location": record.location,
                    "process": record.process,
                }
                if hang.is_silent:
                    self._write_last_stack(rank, record)
            log_event(self._directory.events, "hang", rank=rank, **at)

    def _write_last_stack(self, rank: int, heartbeat: HeartbeatRecord) -> None:
        """Write the main thread's stack of a rank that sends no heartbeats, from its last one."""
        path, head = (
            self._fault_files(rank).stacks_path,
            "Main thread, as of the last heartbeat (most recent call first)",
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(
            path, "".join([f"{head}: {heartbeat.process}\n", *(f"  {frame}\n" for frame in heartbeat.stack)])
        )


FLUSH_INTERVAL_S = 2.0
"""Time for which lines are buffered, so that many ranks cause few writes on a shared file system."""


class RankLog:
    """Observer that logs a rank's own steps. The first write error causes a warning and stops the log, not the run."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock = path, clock
        self._lines: list[str] = []
        self._flushed_at, self._is_disabled = clock(), False

    @hookimpl
    def on_step_end(self, result: StepResult) -> None:
        reported: dict[str, Any] = {"step": result.step, "time": result.end_time, "seconds": result.seconds}
        reported |= {"times": dict(result.times), "memory": dict(result.memory)}
        self._lines.append(json.dumps(reported) + "\n")
        if self._clock() - self._flushed_at >= FLUSH_INTERVAL_S:
            self._write()

    @hookimpl
    def on_run_end(self, summary: RunSummary) -> None:
        self._write()

    def _write(self) -> None:
        self._flushed_at = self._clock()
        lines, self._lines = self._lines, []
        if self._is_disabled or not lines:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            append_text(self._path, "".join(lines))
        except OSError as error:
            self._is_disabled = True
            warn(f"{self._path} cannot be written: {error}. The run continues without it.", stacklevel=2)


class SupportsTimeline(Protocol):
    """Interface of the attribute `timeline` of a manager that records timelines."""

    def record_next(self) -> None:
        """Record the next step."""

    def pop_timeline(self) -> dict[str, Any] | None:
        """Return the timeline of the last step, once; None if it was not recorded. Keys: "time" (Unix time [s]),
        "pp_rank", and "actions", each with kind, stage, micro-batch, start and end [s from "time"]."""

    @property
    def planned_timeline(self) -> dict[str, Any]:
        """The schedule of all ranks along `pp`, after a step was recorded. Keys: "schedule", its "unit" of time, the
        "bubble" from 0 to 1, and "ranks" with the actions of each rank."""


class TimelineLog:
    """Observer that records and writes a rank's timelines. The first write error causes a warning and stops it."""

    def __init__(self, recorder: SupportsTimeline, directory: Path, *, rank: int, every: int) -> None:
        self._recorder, self._directory = recorder, RunDirectory(directory)
        self._rank, self._every = rank, every
        self._has_written_schedule = self._is_disabled = False

    @hookimpl
    def on_run_start(self, run: RunInfo) -> None:
        self._request_step(run.start_step + 1)

    @hookimpl
    def on_step_end(self, result: StepResult) -> None:
        timeline = self._recorder.pop_timeline()
        if timeline is not None and not self._is_disabled:
            try:
                self._write({"step": result.step, **timeline})
            except OSError as error:
                self._is_disabled = True
                warn(
                    f"{self._directory.timeline} cannot be written: {error}. The run continues without it.",
                    stacklevel=2,
                )
        self._request_step(result.step + 1)

    def _request_step(self, step: int) -> None:
        if step % self._every == 0 and not self._is_disabled:
            self._recorder.record_next()

    def _write(self, line: dict[str, Any]) -> None:
        self._directory.timeline.mkdir(parents=True, exist_ok=True)
        if self._rank == 0 and not self._has_written_schedule:
            write_atomically(self._directory.planned_schedule, json.dumps(self._recorder.planned_timeline) + "\n")
            self._has_written_schedule = True
        append_text(self._directory.timeline / f"rank-{self._rank:05}.jsonl", json.dumps(line) + "\n")


def build_timeline_logs(manager: StrategyManager, directory: Path, every: int | None) -> list[TimelineLog]:
    """Return the timeline observer of this rank, if timelines are enabled and the strategy records them."""
    recorder: SupportsTimeline | None = getattr(manager, "timeline", None)
    if recorder is None or every is None:
        return []
    return [TimelineLog(recorder, directory, rank=manager.mesh.rank, every=every)]

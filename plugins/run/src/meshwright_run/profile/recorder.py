"""Profile chosen steps of a rank, measure exposed communication in other steps, and write files after a fault."""

from __future__ import annotations

import faulthandler
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from rich.console import RenderableType
from torch.profiler import ProfilerActivity, profile

from meshwright.plugin import (
    PROFILER_PREFIX,
    Fault,
    atomic_writer,
    create_console,
    hookimpl,
    is_profiling,
    record_if_profiling,
    remove_existing,
    warn,
    write_atomically,
)

from ._compat import dump_flight_records, dump_memory_snapshot, iter_events, record_memory_history, silence_kineto
from .config import FAULT_DIRECTORY, PROFILE_DIRECTORY, ProfileConfig, format_rank_file_name, format_window_suffix
from .render import render_summary
from .summary import build_memory_timeline, summarize_trace, summary_to_dict
from .trace import METADATA_KEY, TraceSpan, measure_exposed_communication, read_trace

NO_CONTEXT: AbstractContextManager[None] = nullcontext()
"""Context of a step that is not profiled."""
FIRST_SAMPLED_INDEX = 3
"""First measured step, counted from 0 in an attempt: earlier steps warm up, and the third is slowed down by the
comparison with its plan."""
TIME_KEY = "exposed_communication"
"""Key in `StepResult.times`."""
_NANO = 1e-9


def get_profiler_activities(device: torch.device, *, with_host: bool = True) -> list[ProfilerActivity]:
    on_device = [] if device.type == "cpu" else [getattr(ProfilerActivity, device.type.upper())]
    return [*([ProfilerActivity.CPU] if with_host or not on_device else []), *on_device]


def warm_up_profiler(device: torch.device) -> None:
    """Start and stop a profiler. The first one of a process takes a second, for which other ranks would wait."""
    silence_kineto()
    with profile(activities=get_profiler_activities(device)):
        pass


class StepProfiler:
    """Profile the windows of one rank, each from the start of its first step to the end of its last.

    A context manager, which ends a window that an error interrupts. `metadata`: metadata of the traces. `start_step`:
    number of steps done before this attempt.
    """

    def __init__(
        self,
        config: ProfileConfig,
        directory: Path,
        *,
        rank: int,
        device: torch.device,
        metadata: Mapping[str, Any],
        start_step: int = 0,
        print_summary: Callable[[RenderableType], None] = lambda shown: create_console().print(shown),
    ) -> None:
        self._config, self._directory, self._rank, self._device = config, directory / PROFILE_DIRECTORY, rank, device
        self._metadata, self._start_step, self._print_summary = metadata, start_step, print_summary
        self._running: tuple[profile, tuple[int, int]] | None = None
        self._last_step = start_step
        if any(last > start_step for _, last in config.windows):
            warm_up_profiler(device)

    def __enter__(self) -> StepProfiler:
        return self

    def __exit__(self, *_: object) -> None:
        self._finish_window()

    def step_context(self, index: int) -> AbstractContextManager[None]:
        step = self._start_step + index + 1
        window = next((each for each in self._config.windows if each[0] <= step <= each[1]), None)
        return NO_CONTEXT if window is None else self._profile_step(step, window)

    @contextmanager
    def _profile_step(self, step: int, window: tuple[int, int]) -> Iterator[None]:
        if self._running is None:
            config = self._config
            if config.memory and self._device.type == "cuda":
                record_memory_history(True)
            profiler = profile(
                activities=get_profiler_activities(self._device),
                record_shapes=config.record_shapes,
                profile_memory=config.memory,
                with_stack=config.with_stack,
            )
            profiler.start()
            self._running = profiler, window
        with record_if_profiling(f"{PROFILER_PREFIX}step {step}"):
            yield
        self._last_step = step
        if step == window[1]:
            self._finish_window()

    def _finish_window(self) -> None:
        if self._running is None:
            return
        (profiler, window), self._running = self._running, None
        about = {**self._metadata, "rank": self._rank, "window": list(window), "last_step": self._last_step}
        profiler.add_metadata_json(METADATA_KEY, json.dumps(about))
        profiler.stop()
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._write(profiler, window)
        except OSError as error:
            warn(
                f"the profile cannot be written to {self._directory}: {error}. The run continues without it.",
                stacklevel=2,
            )

    def _write(self, profiler: profile, window: tuple[int, int]) -> None:
        config = self._config

        def path_of(ending: str) -> Path:
            return self._directory / format_rank_file_name(self._rank, window, config.windows, ending)

        # The file is renamed when it is complete. torch compresses files whose name ends in .gz.
        path = path_of(".json.gz")
        temporary = remove_existing(path.with_name(f".{path.name}"))
        profiler.export_chrome_trace(str(temporary))
        temporary.replace(path)
        if config.memory and self._device.type == "cuda":
            dump_memory_snapshot(remove_existing(path_of("-memory.pickle")))
            record_memory_history(False)
        if not config.memory and self._rank != config.summary_rank:
            return
        trace = read_trace(path)
        if config.memory:
            write_atomically(path_of("-memory.json"), json.dumps(build_memory_timeline(trace)) + "\n")
        if self._rank == config.summary_rank:
            summary, text = summarize_trace(trace), StringIO()
            create_console(file=text, width=120).print(render_summary(summary))
            name = f"summary{format_window_suffix(window, config.windows)}"
            write_atomically(self._directory / f"{name}.json", json.dumps(summary_to_dict(summary), indent=1) + "\n")
            write_atomically(self._directory / f"{name}.txt", text.getvalue())
            self._print_summary(render_summary(summary))


class CommunicationSampler:
    """Measure exposed communication in every `every`-th step, with a profiler without stacks, shapes and memory."""

    def __init__(self, every: int, device: torch.device) -> None:
        self._every, self._device = every, device
        self._times: dict[str, float] = {}
        warm_up_profiler(device)

    def step_context(self, index: int) -> AbstractContextManager[None]:
        is_due = index >= FIRST_SAMPLED_INDEX and (index - FIRST_SAMPLED_INDEX) % self._every == 0
        return self._measure_step() if is_due else NO_CONTEXT

    def read_times(self) -> dict[str, float]:
        times, self._times = self._times, {}
        return times

    @contextmanager
    def _measure_step(self) -> Iterator[None]:
        if is_profiling():
            # The section `profile` or the user runs a profiler, and a process can have only one.
            yield
            return
        with (
            profile(activities=get_profiler_activities(self._device, with_host=False)) as profiler,
            record_if_profiling(f"{PROFILER_PREFIX}step 0"),
        ):
            yield
        self._times = {TIME_KEY: measure_exposed_communication(read_spans(profiler))}


def read_spans(profiler: profile) -> list[TraceSpan]:
    events = list(iter_events(profiler))
    # Seconds since 1970 would lose fractions of microseconds.
    first = min((start for _, _, start, _, _ in events), default=0)
    return [
        TraceSpan(name, kind, (start - first) * _NANO, (end - first) * _NANO, thread)
        for name, kind, start, end, thread in events
    ]


class FaultFileWriter:
    """An observer that writes files to output_dir/faults when this rank fails.

        rank-00000.json           the fault, and the last collectives in torch's flight recorder: kind, group, sizes,
                                  start time, and whether they have completed ("retired")
        rank-00000-gloo.pickle    the same in torch's own format, for its tools; -nccl for NCCL
        rank-00000-stacks.txt     Python stacks of all threads

    Args:
        directory: directory of the run.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        self._directory, self._name = directory / FAULT_DIRECTORY, f"rank-{rank:05}"

    @property
    def stacks_path(self) -> Path:
        return self._directory / f"{self._name}-stacks.txt"

    @hookimpl
    def on_fault(self, fault: Fault) -> None:
        self.write(fault)

    def write(self, fault: Fault, *, cpp_stacks: bool = True) -> dict[str, tuple[int, int, int]]:
        """Write the files, and return how many collectives this rank enqueued, started and completed, by group.

        `cpp_stacks`: whether torch looks up where collectives were called, which takes seconds.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        with atomic_writer(self.stacks_path) as file:
            faulthandler.dump_traceback(file, all_threads=True)
        records = {}
        for backend, as_json, as_pickle in dump_flight_records(with_stacks=cpp_stacks):
            write_atomically(self._directory / f"{self._name}-{backend}.pickle", as_pickle)
            records[backend] = json.loads(as_json)
        text = json.dumps({"fault": asdict(fault), "collectives": records}, indent=1) + "\n"
        write_atomically(self._directory / f"{self._name}.json", text)
        return {group: counts for record in records.values() for group, counts in _count_collectives(record).items()}


def _count_collectives(record: dict[str, Any]) -> dict[str, tuple[int, int, int]]:
    """Return the counts by group name, which is the same on all ranks of a group, for groups named in the record."""
    names = {str(entry["pg_id"]): entry["process_group"][0] for entry in record.get("entries", ())}
    enqueued, started, completed = (f"last_{each}_collective" for each in ("enqueued", "started", "completed"))
    return {
        names[number]: (int(status[enqueued]), int(status[started]), int(status[completed]))
        for number, status in record.get("pg_status", {}).items()
        if number in names
    }

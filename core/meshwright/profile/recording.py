"""Record chosen steps of a rank, and leave behind traces, memory, and what they come to.

A profiler runs from the beginning of a window's first step to the end of its last, so that it sees what happens between
them, too. Before and after, a step is surrounded by nothing. Source: torch.profiler.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from io import StringIO
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from rich.console import RenderableType
from torch.profiler import ProfilerActivity, profile

from .._compat.profiling import dump_memory_snapshot, quieten_kineto, record_memory_history
from ..files.terminal import new_console, warn
from ..files.writing import fresh, write_whole
from .config import ProfileConfig
from .files import DIRECTORY, memory_name, snapshot_name, suffix, trace_name
from .marks import marked
from .memory import timeline
from .show import shown
from .summary import as_values, summarized
from .trace import ABOUT, Trace, read_trace

NOTHING: AbstractContextManager[None] = nullcontext()
"""What surrounds a step that nobody looks at."""


def activities(device: torch.device, *, with_host: bool = True) -> list[ProfilerActivity]:
    """What a profiler looks at on a device."""
    on_device = [] if device.type == "cpu" else [getattr(ProfilerActivity, device.type.upper())]
    return [*([ProfilerActivity.CPU] if with_host or not on_device else []), *on_device]


def warm_up(device: torch.device) -> None:
    """Start a profiler and stop it: the first of a process takes a second to start, for which other ranks would wait
    in the midst of a step."""
    quieten_kineto()
    with profile(activities=activities(device)):
        pass


class Recorder:
    """Profiles the windows of one rank; a context manager, which ends a window that an error has cut short.

    Args:
        config: of the run; this rank is one that it names.
        directory: of the run.
        about: what the traces say of themselves; values of JSON.
        start: steps that were done before this sitting.
        say: shows a summary to a person.
    """

    def __init__(
        self,
        config: ProfileConfig,
        directory: Path,
        *,
        rank: int,
        device: torch.device,
        about: Mapping[str, Any],
        start: int = 0,
        say: Callable[[RenderableType], None] = lambda shown: new_console().print(shown),
    ) -> None:
        self._config, self._directory, self._rank, self._device = config, directory / DIRECTORY, rank, device
        self._about, self._start, self._say = about, start, say
        self._running: tuple[profile, tuple[int, int]] | None = None
        self._last = start
        if any(last > start for _, last in config.windows):
            warm_up(device)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._running is not None:
            self._end()

    def around(self, index: int) -> AbstractContextManager[None]:
        """What a step happens within, counted from 0 in this sitting; see `Loop.around`."""
        step = self._start + index + 1
        window = next((each for each in self._config.windows if each[0] <= step <= each[1]), None)
        return NOTHING if window is None else self._seeing(step, window)

    @contextmanager
    def _seeing(self, step: int, window: tuple[int, int]) -> Iterator[None]:
        if self._running is None:
            self._begin(window)
        with marked(f"step {step}"):
            yield
        self._last = step
        if step == window[1]:
            self._end()

    def _begin(self, window: tuple[int, int]) -> None:
        config = self._config
        if config.memory and self._device.type == "cuda":
            record_memory_history(True)
        profiler = profile(
            activities=activities(self._device),
            record_shapes=config.record_shapes,
            profile_memory=config.memory,
            with_stack=config.with_stack,
        )
        profiler.start()
        self._running = profiler, window

    def _end(self) -> None:
        if self._running is None:
            return
        (profiler, window), self._running = self._running, None
        about = {**self._about, "rank": self._rank, "window": list(window), "last_step": self._last}
        profiler.add_metadata_json(ABOUT, json.dumps(about))
        profiler.stop()
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._write(profiler, suffix(window, self._config.windows))
        except OSError as error:
            warn(
                f"the profile cannot be written to {self._directory}: {error}. The run goes on without it.",
                stacklevel=2,
            )

    def _write(self, profiler: profile, suffix: str) -> None:
        path, config = self._directory / trace_name(self._rank, suffix), self._config
        # A trace that is there is whole. torch packs what ends in .gz.
        new = fresh(path.with_name(f".{path.name}"))
        profiler.export_chrome_trace(str(new))
        new.replace(path)
        if config.memory and self._device.type == "cuda":
            dump_memory_snapshot(fresh(self._directory / snapshot_name(self._rank, suffix)))
            record_memory_history(False)
        if not config.memory and self._rank != config.teller:
            return
        trace = read_trace(path)
        if config.memory:
            text = json.dumps(timeline(trace)) + "\n"
            write_whole(self._directory / memory_name(self._rank, suffix), text)
        if self._rank == config.teller:
            self._tell(trace, suffix)

    def _tell(self, trace: Trace, suffix: str) -> None:
        summary = summarized(trace)
        values = json.dumps(as_values(summary), indent=1) + "\n"
        write_whole(self._directory / f"summary{suffix}.json", values)
        text = StringIO()
        new_console(file=text, width=120).print(shown(summary))
        write_whole(self._directory / f"summary{suffix}.txt", text.getvalue())
        self._say(shown(summary))

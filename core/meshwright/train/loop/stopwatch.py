"""Time the parts of a step.

[Note: device times] Where the host only issues work, parts are measured between events in the device's stream. They are
read when the step's values have been read, for which the host waits anyway; the optimizer's is read one step later.
Never run on a GPU yet.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from ..._compat import profiling
from ...events.step import MARK

if TYPE_CHECKING:
    from ...mesh.progress import Progress

ON_DEVICE = ("forward_backward", "norms", "clip", "optimizer")
"""Parts whose work is done by the device."""


def marked(name: str) -> AbstractContextManager[object]:
    """Name a part of a run for torch's profiler; does nothing where none runs."""
    return profiling.marked(MARK + name)


class Stopwatch:
    """Times the parts of steps, one after the other.

    Args:
        moment: records an event in the device's stream, see `moments_of`; None: the host's clock measures all parts.
        progress: is told of each part that begins.
        clock: tells seconds of the host.
    """

    def __init__(
        self,
        moment: Callable[[], Any] | None,
        progress: Progress | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._moment, self._clock, self._progress = moment, clock, progress
        self._times: dict[str, float] = defaultdict(float)
        self._spans: list[tuple[str, Any, Any]] = []
        self._began = self._since = clock()
        self._event: Any = None
        self._mark: AbstractContextManager[object] | None = None

    def begin(self, step: int = 0, part: str = "data") -> None:
        """Begin a step, counted from 1, and its first part."""
        if self._progress is not None:
            self._progress.begin(step, part)
        self._marks(part)
        self._began = self._since = self._clock()

    def end(self, part: str, then: str | None = None) -> None:
        """End the current part. A part may come in pieces.

        Args:
            then: the part that begins; None: the step ends.
        """
        if self._progress is not None:
            self._progress.enter(then or "callbacks")
        self._marks(then)
        now = self._clock()
        if self._moment is not None:
            event = self._moment()
            if part in ON_DEVICE and self._event is not None:
                self._spans.append((part, self._event, event))
            self._event = event
        if self._moment is None or part not in ON_DEVICE:
            self._times[part] += now - self._since
        self._since = now

    @property
    def seconds(self) -> float:
        """Seconds of the host's clock from the beginning of the step to the end of its last part."""
        return self._since - self._began

    def _marks(self, part: str | None) -> None:
        # A step that has failed leaves its last mark open; the next one closes it.
        if self._mark is not None:
            self._mark.__exit__(None, None, None)
        self._mark = marked(part) if part is not None and profiling.is_profiled() else None
        if self._mark is not None:
            self._mark.__enter__()

    def take(self) -> dict[str, float]:
        """Return the seconds by part that are known by now; see [Note: device times]."""
        waiting = []
        for part, start, end in self._spans:
            if end.query():
                self._times[part] += start.elapsed_time(end) / 1e3
            else:
                waiting.append((part, start, end))
        self._spans = waiting
        found, self._times = dict(self._times), defaultdict(float)
        return found

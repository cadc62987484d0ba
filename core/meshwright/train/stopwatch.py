"""How long the parts of a step take.

[Note: device times] Where the host only issues work, its clock tells nothing of it. There, parts lie between events in
the device's stream, whose times are read when the step's values have been read, for which the host waits anyway. What
comes behind that, the optimizer, is read one step later. Never run on a GPU yet.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from .._compat.profiling import is_profiled
from ..mesh.progress import Progress
from ..profile.marks import marked

ON_DEVICE = ("forward_backward", "norms", "clip", "optimizer")
"""Parts whose work is the device's."""


class Stopwatch:
    """Times the parts of steps, one after the other.

    Args:
        moment: notes one in the device's stream, see `moments_of`; None: the host's clock tells all.
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
        self._moment, self._clock, self._progress = moment, clock, progress or Progress()
        self._times: dict[str, float] = defaultdict(float)
        self._spans: list[tuple[str, Any, Any]] = []
        self._began = self._since = clock()
        self._event: Any = None
        self._mark: AbstractContextManager[object] | None = None

    def begin(self, step: int = 0, part: str = "data") -> None:
        """A step begins, counted from 1, and with it a part, which a profiler sees by its name."""
        self._progress.begin(step, part)
        self._marks(part)
        self._began = self._since = self._clock()

    def end(self, part: str, then: str | None = None) -> None:
        """The part ends that began with the step, or where the last one ended. A part may come in pieces.

        Args:
            then: the one that begins; None: the step ends, and observers and callbacks are told.
        """
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
        """Seconds of the host's clock from the beginning of the step to where its last part ended."""
        return self._since - self._began

    def _marks(self, part: str | None) -> None:
        """A step that an error has ended leaves its last mark open; the next one closes it."""
        if self._mark is not None:
            self._mark.__exit__(None, None, None)
        self._mark = marked(part) if part is not None and is_profiled() else None
        if self._mark is not None:
            self._mark.__enter__()

    def take(self) -> dict[str, float]:
        """Seconds by part, of what is known; see [Note: device times]. Of one rank."""
        waiting = []
        for part, start, end in self._spans:
            if end.query():
                self._times[part] += start.elapsed_time(end) / 1e3
            else:
                waiting.append((part, start, end))
        self._spans = waiting
        found, self._times = dict(self._times), defaultdict(float)
        return found

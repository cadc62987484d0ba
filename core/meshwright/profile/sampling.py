"""Measure exposed communication in some of a run's steps, by a profiler that sees little: no stacks, shapes or memory.

On an accelerator it looks at the device alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch.profiler import profile

from .._compat.profiling import is_profiled, seen_by
from .activity import exposed_communication
from .marks import marked
from .recording import NOTHING, activities, warm_up
from .spans import Span

FIRST = 3
"""The first step that is measured, counted from 0 in a sitting: those before warm up, and the third is compared with
its plan, which slows it down."""
TIME = "exposed_communication"
"""Under which name it is among `StepResult.times`."""
_NANO = 1e-9


class Sampler:
    """Measures a rank's steps, every so many.

    Args:
        every: steps from one that is measured to the next.
    """

    def __init__(self, every: int, device: torch.device) -> None:
        self._every, self._device = every, device
        self._measured: dict[str, float] = {}
        warm_up(device)

    def around(self, index: int) -> AbstractContextManager[None]:
        """What a step happens within, counted from 0 in this sitting; see `Loop.around`."""
        is_due = index >= FIRST and (index - FIRST) % self._every == 0
        return self._measuring() if is_due else NOTHING

    def measured(self) -> dict[str, float]:
        """See `Loop.measured`."""
        found, self._measured = self._measured, {}
        return found

    @contextmanager
    def _measuring(self) -> Iterator[None]:
        if is_profiled():
            # A window of the section `profile`, or of the user's own; two profilers of one process do not go together.
            yield
            return
        with self._profiler() as profiler, marked("step 0"):
            yield
        self._measured = {TIME: exposed_communication(spans_of(profiler))}

    def _profiler(self) -> profile:
        return profile(activities=activities(self._device, with_host=False))


def spans_of(profiler: profile) -> list[Span]:
    """What a profiler has seen that has stopped."""
    events = list(seen_by(profiler))
    # Seconds since 1970 would leave fractions of microseconds out.
    first = min((start for _, _, start, _, _ in events), default=0)
    return [
        Span(name, kind, (start - first) * _NANO, (end - first) * _NANO, thread)
        for name, kind, start, end, thread in events
    ]


def around_both(
    outer: Callable[[int], AbstractContextManager[None]], inner: Callable[[int], AbstractContextManager[None]]
) -> Callable[[int], AbstractContextManager[None]]:
    """One `Loop.around` of two."""

    def around(index: int) -> AbstractContextManager[None]:
        contexts = [each for each in (outer(index), inner(index)) if each is not NOTHING]
        return _within(*contexts) if len(contexts) == 2 else contexts[0] if contexts else NOTHING

    return around


@contextmanager
def _within(outer: AbstractContextManager[None], inner: AbstractContextManager[None]) -> Iterator[None]:
    with outer, inner:
        yield

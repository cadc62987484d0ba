"""Bound the time of work that text of others decides on: a pattern, or a template. No torch in this module."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def time_limit(seconds: float, what: str) -> Iterator[None]:
    """A context that is ended after a time, by an error within it.

    It bounds Python's code, and matching by `re`; other code of libraries ends first. Where signals are not handled, in
    other threads than the main one, or where somebody else has set an alarm, there is no limit.

    Args:
        what: takes so long, for the error.

    Raises:
        TimeoutError: the time is over.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getitimer(signal.ITIMER_REAL)[0]:
        yield
        return

    def expire(_number: int, _frame: FrameType | None) -> None:
        raise TimeoutError(f"{what} took longer than {seconds:g} seconds")

    before = signal.signal(signal.SIGALRM, expire)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

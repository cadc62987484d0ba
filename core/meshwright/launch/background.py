"""Work beside the rest of a rank."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from .._compat.profiling import marked
from ..events.step import WAIT

T = TypeVar("T")


def in_background(work: Callable[[], T]) -> Callable[[], T]:
    """Run `work` in a thread that does not hold up the end of the process; gives what waits for its result, or raises
    its error. What is waited for is what other ranks say, and a profiler sees it so."""
    box: list[T | BaseException] = []

    def run() -> None:
        try:
            box.append(work())
        except BaseException as error:
            box.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def wait() -> T:
        with marked(WAIT):
            thread.join()
        (result,) = box
        if isinstance(result, BaseException):
            raise result
        return result

    return wait

"""Wait for gloo's threads, which release the tensors of a collective a moment after it is over.

Only then is what a rank holds the same in each run. And a process that ends earlier is aborted by such a thread
("terminate called without an active exception"), which needs Python's lock to free a tensor: pytorch/pytorch pull
request 179291, issue 190489.
"""

from __future__ import annotations

import atexit
import functools
import os
import time
from collections.abc import Iterator
from pathlib import Path

from .._compat.torch import GLOO_THREAD

_POLL_S, _TIMEOUT_S = 5e-5, 1.0
_TASKS = Path("/proc/self/task")
_NAMED = f"({GLOO_THREAD}) "


def settle() -> None:
    """Return once all gloo threads are idle, or after a second. On Linux only; elsewhere, at once.

    A thread that waits for another rank is idle: its tensors are still in use.
    """
    if not _TASKS.is_dir():
        return
    end = time.monotonic() + _TIMEOUT_S
    # Twice, since this thread may take Python's lock, which freeing a tensor needs, before a gloo thread gets it.
    for _ in range(2):
        time.sleep(_POLL_S)
        while any(state != "S" for state in _states()) and time.monotonic() < end:
            time.sleep(_POLL_S)


@functools.cache
def settle_at_exit() -> None:
    """Make this process `settle` before Python ends."""
    atexit.register(settle)


def _states() -> Iterator[str]:
    """The state of each gloo thread as a letter; "S" for sleeping."""
    for task in os.listdir(_TASKS):
        try:
            status = (_TASKS / task / "stat").read_text(encoding="utf-8")
        except OSError:
            continue  # the thread has ended
        if _NAMED in status:
            yield status.partition(_NAMED)[2][0]

"""Wait for gloo's threads: a collective is over a moment before its thread lets go of the tensors that it has sent.

On a busy machine that moment may last. What a rank holds is the same in each run only once it is over; and a process
that ends before is aborted by its own thread ("terminate called without an active exception"), which needs Python's
lock to free a tensor, and finds no Python any more: pytorch/pytorch pull request 179291, issue 190489.
"""

from __future__ import annotations

import atexit
import functools
import os
import time
from collections.abc import Iterator
from pathlib import Path

from .._compat.torch import GLOO_THREAD

_A_MOMENT, _AT_MOST = 5e-5, 1.0
_TASKS = Path("/proc/self/task")
_NAMED = f"({GLOO_THREAD}) "


def settle() -> None:
    """Return once no thread of gloo has anything to do, or after a second. Linux only; elsewhere, at once.

    One that waits for another rank has nothing to do: then the tensors are still in use.
    """
    if not _TASKS.is_dir():
        return
    end = time.monotonic() + _AT_MOST
    # Once more, as the lock of Python, which freeing a tensor takes, may have been ours again before a thread had it.
    for _ in range(2):
        time.sleep(_A_MOMENT)
        while any(state != "S" for state in _states()) and time.monotonic() < end:
            time.sleep(_A_MOMENT)


@functools.cache
def settle_at_exit() -> None:
    """Have this process `settle` before Python ends."""
    atexit.register(settle)


def _states() -> Iterator[str]:
    """Of gloo's threads, a letter each; "S" for those that sleep."""
    for task in os.listdir(_TASKS):
        try:
            status = (_TASKS / task / "stat").read_text(encoding="utf-8")
        except OSError:
            # It has ended.
            continue
        if _NAMED in status:
            yield status.partition(_NAMED)[2][0]

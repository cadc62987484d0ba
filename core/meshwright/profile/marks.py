"""What the loop does, by names that a profiler of torch sees; where none runs, nothing happens."""

from __future__ import annotations

from contextlib import AbstractContextManager

from .._compat import profiling
from ..events.step import MARK


def marked(name: str) -> AbstractContextManager[object]:
    """A stretch of a run, by its name: "step 10", "forward_backward", "save"."""
    return profiling.marked(MARK + name)

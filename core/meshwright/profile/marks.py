"""Names of what the loop does, in the trace of whatever profiler of torch runs; where none runs, nothing happens."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch.profiler import record_function

from .._compat.profiling import is_profiled
from .spans import MARK


def marked(name: str) -> AbstractContextManager[object]:
    """A stretch of a run, by its name: "step 10", "forward_backward", "save"."""
    return record_function(MARK + name) if is_profiled() else nullcontext()

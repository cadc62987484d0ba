"""Keep Python from importing out of the current directory, where a file `torch.py` may come with a data set.

`python -c` and `python -m`, with which multiprocessing, torch's compiler and meshwright start processes, look there
first; `-P` and PYTHONSAFEPATH prevent it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

VARIABLE = "PYTHONSAFEPATH"
PYTHON = (sys.executable, "-P")
"""The command of a Python that imports nothing from the current directory."""


def protect_children() -> None:
    """Keep all Python processes that this one starts, directly or not, from importing out of the current directory."""
    os.environ[VARIABLE] = "1"


@contextmanager
def protected_children() -> Iterator[None]:
    """Apply `protect_children` to processes that are started in the context."""
    before = os.environ.get(VARIABLE)
    protect_children()
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def leave_current_directory() -> None:
    """Remove the current directory from this process's own path, where `python -m` has put it first."""
    if not sys.flags.safe_path and sys.path:
        with suppress(OSError):
            # It may have been removed.
            if sys.path[0] in ("", os.getcwd()):
                del sys.path[0]

"""Keep Python from importing out of the current directory, where a file `torch.py` may come with a data set.

`python -c` and `python -m`, with which multiprocessing, torch's compiler and meshwright start processes, look there
first; `-P` and PYTHONSAFEPATH prevent it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

SAFE_PATH_VARIABLE = "PYTHONSAFEPATH"
SAFE_PYTHON = (sys.executable, "-P")
"""The command of a Python that imports nothing from the current directory."""


def enable_safe_path() -> None:
    """Keep all Python processes that this one starts, directly or not, from importing out of the current directory."""
    os.environ[SAFE_PATH_VARIABLE] = "1"


@contextmanager
def safe_path_enabled() -> Iterator[None]:
    """Apply `enable_safe_path` to processes that are started in the context."""
    before = os.environ.get(SAFE_PATH_VARIABLE)
    enable_safe_path()
    try:
        yield
    finally:
        if before is None:
            del os.environ[SAFE_PATH_VARIABLE]
        else:
            os.environ[SAFE_PATH_VARIABLE] = before


def remove_cwd_from_sys_path() -> None:
    """Remove the current directory from this process's own path, where `python -m` has put it first."""
    if not sys.flags.safe_path and sys.path:
        with suppress(OSError):
            # It may have been removed.
            if sys.path[0] in ("", os.getcwd()):
                del sys.path[0]

"""Keep Python from importing modules from the current directory, where a dataset may contain a file `torch.py`.

Multiprocessing, torch's compiler and meshwright start processes with `python -c` and `python -m`, which import from the
current directory first. `-P` and PYTHONSAFEPATH prevent it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

SAFE_PATH_VARIABLE = "PYTHONSAFEPATH"
SAFE_PYTHON = (sys.executable, "-P")
"""Command that starts a Python that imports nothing from the current directory."""


def enable_safe_path() -> None:
    """Keep all descendant Python processes from importing modules from the current directory."""
    os.environ[SAFE_PATH_VARIABLE] = "1"


@contextmanager
def safe_path_enabled() -> Iterator[None]:
    """Apply `enable_safe_path` to processes that are started within the context."""
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
    """Remove the current directory from this process's `sys.path`, where `python -m` puts it first."""
    if not sys.flags.safe_path and sys.path:
        with suppress(OSError):
            # The directory may no longer exist.
            if sys.path[0] in ("", os.getcwd()):
                del sys.path[0]

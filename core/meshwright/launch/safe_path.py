"""What a Python that is started imports nothing from: the directory in which the user happens to stand.

`python -c` and `python -m`, by which multiprocessing, torch's compiler and meshwright start processes, look there
first: a file `torch.py` that came along with a data set would be run. `-P` and PYTHONSAFEPATH leave it out. No torch
in this module.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

VARIABLE = "PYTHONSAFEPATH"
PYTHON = (sys.executable, "-P")
"""A Python as this one, which imports nothing from the current directory."""


def protect_children() -> None:
    """Let all processes of Python that this one starts, directly or not, import nothing from the current directory."""
    os.environ[VARIABLE] = "1"


@contextmanager
def protected_children() -> Iterator[None]:
    """`protect_children` of those that are started in the context."""
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
    """Take the current directory out of this process's own path, where `python -m` has put it first."""
    if not sys.flags.safe_path and sys.path:
        with suppress(OSError):
            # It may have been removed.
            if sys.path[0] in ("", os.getcwd()):
                del sys.path[0]

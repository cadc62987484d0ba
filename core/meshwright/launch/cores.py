"""The cores of this machine."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Those that this process may use; at least 1. Source: `os.sched_getaffinity`, where there is one."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

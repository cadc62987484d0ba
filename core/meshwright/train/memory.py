"""Memory of this process, and of its device."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import torch

from ..tensors.ops import is_accelerator

_STATM = Path("/proc/self/statm")
_PEAK_UNIT = 1 if sys.platform == "darwin" else 1024
"""Bytes of what getrusage counts in."""


def memory_now(device: torch.device) -> dict[str, int]:
    """Bytes by kind; see `StepResult.memory`. What the system does not tell is left out.

    Source: proc(5), getrusage(2), torch.accelerator.
    """
    found = {"host_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _PEAK_UNIT}
    if _STATM.exists():
        found["host"] = int(_STATM.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
        # The system counts peaks less often.
        found["host_peak"] = max(found["host_peak"], found["host"])
    if is_accelerator(device):
        found["allocated"] = torch.accelerator.memory_allocated(device)
        found["allocated_peak"] = torch.accelerator.max_memory_allocated(device)
        found["reserved"] = torch.accelerator.memory_reserved(device)
        found["reserved_peak"] = torch.accelerator.max_memory_reserved(device)
    return found

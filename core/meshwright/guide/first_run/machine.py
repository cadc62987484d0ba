"""What this machine has to train on."""

from __future__ import annotations

import functools
import os

from ...launch.cores import usable_cores
from .answers import Machine

RANKS_ON_CPU = 4
"""At most: each is a process with a copy of torch."""


@functools.cache
def find_machine() -> Machine:
    """The accelerators of this machine, or the ranks that its cores serve. Imports torch."""
    import torch

    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        count = torch.accelerator.device_count()
        memory = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 0
        return Machine(kind.type if kind is not None else "cpu", count, memory)
    ranks = min(RANKS_ON_CPU, usable_cores())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine("cpu", ranks, memory // ranks)

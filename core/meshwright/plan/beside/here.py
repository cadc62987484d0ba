"""The device that a run is on, as plans know it."""

from __future__ import annotations

import torch

from ..device import Device, devices, find_device

LIKE = "h100-80gb"
"""The file whose figures stand for an accelerator that none describes; its times are not told then."""


def device_here(kind: torch.device, *, ranks_here: int, memory_of_node: int) -> tuple[Device, bool]:
    """The device of this process, and whether times on it can be told.

    Args:
        ranks_here: ranks that share this node.
        memory_of_node: bytes of its own memory, which ranks on the CPU share.
    """
    if kind.type != "cuda":
        # Allocators of the CPU give back what is freed, and keep nothing of other libraries'.
        cpu = find_device("cpu")
        memory = memory_of_node // max(1, ranks_here)
        return cpu.model_copy(update={"name": "this CPU", "memory_bytes": memory, "context_bytes": 0}), False
    found, known = torch.cuda.get_device_properties(kind), known_here(kind)
    base = known or find_device(LIKE)
    return base.model_copy(update={"name": found.name, "memory_bytes": found.total_memory}), known is not None


def known_here(kind: torch.device) -> Device | None:
    """The device of this process by the name that its driver gives; None: a CPU, or one that no file describes."""
    if kind.type != "cuda":
        return None
    name = torch.cuda.get_device_properties(kind).name
    return next((each for each in map(find_device, devices()) if name in each.known_as), None)


def peak_flops(kind: torch.device, dtype: str) -> float | None:
    """Products of a dtype that the device of this process could do at most [FLOP/s]; None: not known, or a CPU."""
    known = known_here(kind)
    return None if known is None else known.flops.get(dtype)

"""What of a device only an accelerator can tell."""

from __future__ import annotations

from collections.abc import Callable

import torch


def is_accelerator(device: torch.device) -> bool:
    """Whether torch can ask the device for its memory and its times: this build has a runtime for it.

    Source: torch.accelerator.
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    return found is not None and found.type == device.type


def moments_of(device: torch.device) -> Callable[[], torch.Event] | None:
    """What notes a moment of the device's stream, between two of which work is timed; None: it is no accelerator.

    Source: torch.Event.
    """
    if not is_accelerator(device):
        return None

    def moment() -> torch.Event:
        event = torch.Event(device, enable_timing=True)
        event.record()
        return event

    return moment

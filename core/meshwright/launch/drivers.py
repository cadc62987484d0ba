"""Why there is no GPU. Imports torch."""

from __future__ import annotations

import torch


def missing_driver(before: str = "") -> str:
    """Why a build of torch for GPUs finds none, behind `before`; "" where it finds some, or is one for CPUs."""
    built = (
        f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}" if torch.version.hip else ""
    )
    if not built or torch.accelerator.is_available():
        return ""
    return f"{before}torch {torch.__version__} is built for {built}, but finds no GPU with a driver."

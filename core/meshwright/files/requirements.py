"""Whether the installed torch is one that this package supports, from metadata alone. Imports no torch."""

from __future__ import annotations

import importlib.metadata
import re

from ..base.errors import StrategyError

DISTRIBUTION = "meshwright"


def check_torch() -> None:
    """Refuse a torch that is older than this package supports, before anything is imported from it.

    Raises:
        StrategyError: names the installed version and the oldest one that is supported.
    """
    try:
        installed, oldest = importlib.metadata.version("torch"), oldest_torch()
    except importlib.metadata.PackageNotFoundError:
        # No torch, or a source tree that is not installed: an import says so.
        return
    if _numbers(installed) < _numbers(oldest):
        raise StrategyError(
            f"torch {installed} is installed, and meshwright needs torch {oldest} or later. Install a newer one: "
            f"pip install 'torch>={oldest}'."
        )


def oldest_torch() -> str:
    """The oldest version that the installed package's metadata allows, such as "2.11"."""
    for each in importlib.metadata.requires(DISTRIBUTION) or ():
        found = re.match(r"torch\b[^;]*?>=\s*([\d.]+)", each)
        if found is not None:
            return found[1]
    return "0"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(each) for each in re.findall(r"\d+", version.split("+")[0])[:2])

"""Versions: whether the installed torch is supported, and names and options that will be removed. Imports no torch."""

from __future__ import annotations

import importlib.metadata
import re
import sys

from packaging.version import Version

from ..base.errors import StrategyError
from .terminal import warn

DISTRIBUTION = "meshwright"
_INTERNAL_PACKAGES = re.compile(r"(meshwright|pydantic)(?=[._]|$)")
"""Packages whose frames a deprecation warning skips: ours, and what calls our validators."""


def check_torch_version() -> None:
    """Refuse a torch that is older than this package supports, from metadata alone. Raises StrategyError."""
    try:
        installed, oldest = importlib.metadata.version("torch"), get_min_torch_version()
    except importlib.metadata.PackageNotFoundError:
        # No torch, or a source tree that is not installed: an import says so.
        return
    if Version(installed).release[:2] < Version(oldest).release[:2]:
        raise StrategyError(
            f"torch {installed} is installed, and meshwright needs torch {oldest} or later. Install a newer one: "
            f"pip install 'torch>={oldest}'."
        )


def get_min_torch_version() -> str:
    """Return the oldest version that the installed package's metadata allows, such as "2.11"."""
    for each in importlib.metadata.requires(DISTRIBUTION) or ():
        found = re.match(r"torch\b[^;]*?>=\s*([\d.]+)", each)
        if found is not None:
            return found[1]
    return "0"


def warn_deprecated(name: str, *, since: str, removed_in: str, remedy: str) -> None:
    """Warn of the use of something deprecated, at the line of the caller's code; see docs/contribute/releasing.md.

    `name` is the name with its kind, such as "the option use_custom_fsdp"; a test fails once `removed_in` is due.
    """
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and _INTERNAL_PACKAGES.match(frame.f_globals.get("__name__", "")):
        frame, level = frame.f_back, level + 1
    text = f"{name} is deprecated since meshwright {since} and goes away in {removed_in}. {remedy}"
    warn(text, DeprecationWarning, stacklevel=level)

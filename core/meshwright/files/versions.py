"""Checks of the installed torch version, and deprecation warnings. Imports no torch."""

from __future__ import annotations

import importlib.metadata
import re
import sys

from packaging.version import Version

from ..base.errors import StrategyError
from .terminal import warn

DISTRIBUTION = "meshwright"
_INTERNAL_PACKAGES = re.compile(r"(meshwright|pydantic)(?=[._]|$)")
"""Packages whose frames a deprecation warning skips: meshwright, and pydantic, which calls its validators."""


def check_torch_version() -> None:
    """Raise StrategyError if the installed torch is older than supported. Reads only package metadata."""
    try:
        installed, oldest = importlib.metadata.version("torch"), get_min_torch_version()
    except importlib.metadata.PackageNotFoundError:
        # torch is missing, or this source tree is not installed: an import raises the error.
        return
    if Version(installed).release[:2] < Version(oldest).release[:2]:
        raise StrategyError(
            f"torch {installed} is installed, and meshwright needs torch {oldest} or later. Install a newer one: "
            f"pip install 'torch>={oldest}'."
        )


def get_min_torch_version() -> str:
    """Return the oldest torch version that the installed package's metadata allows, such as "2.11"."""
    for each in importlib.metadata.requires(DISTRIBUTION) or ():
        match = re.match(r"torch\b[^;]*?>=\s*([\d.]+)", each)
        if match is not None:
            return match[1]
    return "0"


def warn_deprecated(name: str, *, since: str, removed_in: str, remedy: str) -> None:
    """Warn about the use of a deprecated name, at the line of the user's code; see docs/contribute/releasing.md.

    `name` includes its kind, such as "the option use_custom_fsdp". A test fails once `removed_in` is reached.
    """
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and _INTERNAL_PACKAGES.match(frame.f_globals.get("__name__", "")):
        frame, level = frame.f_back, level + 1
    text = f"{name} is deprecated since meshwright {since} and goes away in {removed_in}. {remedy}"
    warn(text, DeprecationWarning, stacklevel=level)

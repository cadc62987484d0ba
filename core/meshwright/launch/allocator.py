"""How torch's CUDA allocator is set up: with expandable segments, unless the user says otherwise.

Without them, memory that is freed in one size is seldom reused for another: the same run reserved 16 to 26 % more on an
H200. torch reads the setting when CUDA starts.
Source: torch's notes on CUDA semantics, "Optimizing memory usage with PYTORCH_ALLOC_CONF".
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Mapping, MutableMapping

SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables that torch reads, its first choice first; torch 2.11 and later know both."""
_EXPANDABLE = "expandable_segments:True"


def prefer_expandable_segments(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set `expandable_segments:True` for this process and those it starts, if neither variable is set.

    Does nothing where torch does not support it: outside Linux, and on ROCm.
    """
    if uses_expandable_segments(environment) and not _settings(environment) and _is_supported():
        environment[SETTINGS[0]] = _EXPANDABLE


def uses_expandable_segments(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether runs that are started from this environment have expandable segments; see the module."""
    settings = _settings(environment)
    return not settings or _EXPANDABLE.lower() in settings.replace(" ", "").lower()


def _settings(environment: Mapping[str, str]) -> str:
    return next((environment[name] for name in SETTINGS if environment.get(name)), "")


def _is_supported() -> bool:
    return sys.platform == "linux" and "rocm" not in importlib.metadata.version("torch")

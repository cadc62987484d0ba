"""What an error says, for tasks of ranks, whose errors end the test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshwright import MeshwrightError


def catch_error(call: Callable[..., Any], *args: Any, **options: Any) -> str:
    """Return the type and text of the MeshwrightError that a call raises; "" if it raises none."""
    try:
        call(*args, **options)
    except MeshwrightError as error:
        return f"{type(error).__name__}: {error}"
    return ""

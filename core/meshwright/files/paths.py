"""Paths that a user writes in a config."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator


def check_path(value: str) -> str:
    """No file can have such a name; the system would say so in the midst of the run."""
    if not value or "\0" in value:
        raise ValueError("is no path: it is empty, or holds a zero byte")
    if any(len(part.encode()) > 255 for part in value.split("/")) or len(value.encode()) > 4000:
        raise ValueError("is too long for a path: 255 bytes between slashes, 4,000 in all")
    if value.startswith("~"):
        try:
            Path(value).expanduser()
        except RuntimeError:
            raise ValueError("names the home directory of a user who is unknown here") from None
    return value


PathText = Annotated[str, AfterValidator(check_path)]
"""The path of a file or directory, which need not exist."""

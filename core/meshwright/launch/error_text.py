"""What a command says of an error of the user's making."""

from __future__ import annotations

from ..base import errors
from ..base.errors import MeshwrightError


def said(error: MeshwrightError) -> str:
    """Its message, and a line that leads to the section about its class."""
    # A class of one room's own is told by the one that it derives from.
    known = next(cls for cls in type(error).__mro__ if cls.__module__ == errors.__name__)
    return f"error: {error}\nsee docs/troubleshooting.md#{known.__name__.lower()}"

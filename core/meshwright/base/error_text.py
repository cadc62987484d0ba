"""How commands and ranks show an error of the user's making."""

from __future__ import annotations

from . import errors
from .errors import MeshwrightError


def said(error: MeshwrightError) -> str:
    """Return its message, and a line that leads to the section about its class."""
    # A room's own subclass is documented under the class that it derives from.
    known = next(cls for cls in type(error).__mro__ if cls.__module__ == errors.__name__)
    return f"error: {error}\nsee docs/troubleshooting.md#{known.__name__.lower()}"

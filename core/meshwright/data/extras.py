"""Libraries of the extra `meshwright[data]`, imported when they are first needed."""

from __future__ import annotations

import importlib
from typing import Any

from ..base.errors import DataError


def extra(module: str, purpose: str) -> Any:
    """Import a module of the extra.

    Args:
        module: its name, with dots.
        purpose: what cannot be done without it, as the subject of a sentence.

    Raises:
        DataError: it is not installed, or cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        raise DataError(
            f"{purpose} needs the package {name}, which cannot be imported ({error}). Install what data of all kinds "
            "need: pip install -e '.[data]' in a clone."
        ) from error

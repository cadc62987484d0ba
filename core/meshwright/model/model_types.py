"""The model types of transformers, known without torch."""

from __future__ import annotations

from .._compat.model_types import model_types
from ..base.errors import ModelError, nearest


def check_model_type(model_type: str, *, where: str = "model") -> None:
    """Refuse a model type that transformers does not have.

    Args:
        where: what has the `model_type`, for the error.

    Raises:
        ModelError: with the nearest that it has.
    """
    known = model_types()
    if model_type not in known:
        hint = nearest(model_type, known)
        raise ModelError(f"{where}.model_type={model_type!r} is not a model type of transformers.{hint}")

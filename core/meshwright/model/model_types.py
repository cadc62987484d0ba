"""The model types of transformers, known without what builds models."""

from __future__ import annotations

from ..base.errors import ModelError, nearest


def check_model_type(model_type: str, *, where: str = "model") -> None:
    """Refuse a model type that transformers does not have.

    Args:
        where: what has the `model_type`, for the error.

    Raises:
        ModelError: with the nearest that it has.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        hint = nearest(model_type, CONFIG_MAPPING.keys())
        raise ModelError(f"{where}.model_type={model_type!r} is not a model type of transformers.{hint}")

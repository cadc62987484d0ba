"""What is often wrong with the model of a run, found before what trains it is imported. No torch in this module."""

from __future__ import annotations

from ..model.configuration import model_config
from ..model.model_types import check_model_type
from .run_file import RunConfig


def check_model(config: RunConfig) -> None:
    """Refuse a new model that transformers would refuse. What has files of its own is looked at later.

    Raises:
        ModelError: as `plan_run` does.
    """
    if "model_type" in config.model:
        # A type that there is not is known without importing transformers.
        check_model_type(str(config.model["model_type"]))
        model_config(config.model, tokenizer=None, seq_len=config.data.seq_len)

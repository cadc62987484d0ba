"""The model in a checkpoint: its tensors, read one at a time, and its class."""

from __future__ import annotations

import functools
from collections.abc import Collection
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor, nn

from ..base.errors import CheckpointError
from ..files.parsing import reason
from ..model.configuration import check_brings_no_code
from ..model.remote_code import check_needs_no_code
from ..tensors.pieces import Sharded, tensor_pieces
from .directory import HUGGING_FACE
from .manifest import Manifest
from .on_disk import on_this_machine
from .payload import read_tensors
from .places import Place
from .read_index import read_index
from .values import AVERAGES, MODEL


class StoredModel:
    """What a checkpoint has of the model.

    Args:
        average: read the averages of weights in their place, where there are any: of what was trained.

    Raises:
        CheckpointError: there are none.

    Attributes:
        checkpoint, manifest: its place, and what it tells.
        directory: of its files of Hugging Face, on this machine.
        described: these: where each is, and its name there.
        kinds: shape and dtype of each tensor.
    """

    def __init__(self, checkpoint: Place, manifest: Manifest, *, average: bool = False) -> None:
        self.checkpoint, self.manifest = checkpoint, manifest
        names = [name for name in manifest.files if PurePath(name).parts[0] == HUGGING_FACE]
        held = on_this_machine(checkpoint, manifest, names)
        # Where it is a copy, it goes when this does.
        self._held, self.directory = held, held.path / HUGGING_FACE
        self.described = [(held.path / name, PurePath(name).relative_to(HUGGING_FACE).as_posix()) for name in names]
        self._index = read_index(checkpoint, manifest)
        self._average = average
        if average and not any(name.startswith(AVERAGES) for name in self._index.kinds):
            raise CheckpointError(
                f"the checkpoint {checkpoint} has no average of the weights: the run has kept none (ema). Export its "
                f"weights."
            )
        self.kinds = {
            name.removeprefix(MODEL): kind for name, kind in self._index.kinds.items() if name.startswith(MODEL)
        }

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """All of a tensor, on the CPU; in its own dtype unless another is given."""
        shape, own = self.kinds[name]
        tensor = torch.empty(shape, dtype=dtype or own)
        averaged = f"{AVERAGES}{name}"
        stored = averaged if self._average and averaged in self._index.kinds else f"{MODEL}{name}"
        read_tensors(
            self.checkpoint,
            self.manifest,
            self._index,
            {stored: Sharded(tensor.shape, tensor.dtype, tuple(tensor_pieces(tensor)))},
        )
        return tensor


def model_on_meta(source: StoredModel, *, adapted: bool = False) -> nn.Module:
    """The model whose tensors have been stored: a causal LM, or one with a head over tokens or sequences.

    Args:
        adapted: they are those of adapters; the model is their base.

    Raises:
        CheckpointError: transformers cannot build it, or the tensors are of another.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

    checkpoint, stored = source.checkpoint, source.kinds
    directory = source.directory
    if "config.json" not in [name for _, name in source.described]:
        raise CheckpointError(
            f"the checkpoint {checkpoint} has no configuration of a Hugging Face model, so it cannot be exported."
        )
    check_brings_no_code(directory / "config.json")
    check_needs_no_code(directory, where="--trust-remote-code")
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        build: Any = functools.partial(AutoModelForCausalLM.from_config, trust_remote_code=False)
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            # That of the text part of a multimodal type, which the auto class takes as a part of the whole only.
            known: list[Any] = [each for each in MODEL_FOR_CAUSAL_LM_MAPPING.values() if isinstance(each, type)]
            build = next((each for each in known if each.config_class is type(config)), build)
        with torch.device("meta"):
            model: nn.Module = build(config)
            if not adapted and not model.state_dict().keys() >= set(stored):
                model = _with_other_head(config, stored) or model
    except Exception as error:
        # Each configuration and each model class fails in its own way.
        raise CheckpointError(
            f"transformers cannot build the model of the checkpoint {checkpoint}: {reason(error)}"
        ) from error
    unknown = [] if adapted else sorted(set(stored) - model.state_dict().keys())
    if unknown:
        raise CheckpointError(
            f"the checkpoint {checkpoint} is not of the model that its configuration gives: {type(model).__name__} has "
            f"no {', '.join(unknown[:3])}{', ...' if len(unknown) > 3 else ''}."
        )
    return model


def _with_other_head(config: Any, stored: Collection[str]) -> nn.Module | None:
    """The model with a head over tokens or sequences that has these tensors; on the device of the context."""
    from transformers import (
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
        MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
        AutoModelForSequenceClassification,
        AutoModelForTokenClassification,
    )

    autos: list[tuple[Any, Any]] = [
        (MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING, AutoModelForTokenClassification),
        (MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, AutoModelForSequenceClassification),
    ]
    for mapping, auto in autos:
        if type(config) in mapping:
            model: nn.Module = auto.from_config(config, trust_remote_code=False)
            if model.state_dict().keys() == set(stored):
                return model
    return None

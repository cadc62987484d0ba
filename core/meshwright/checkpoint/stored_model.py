"""The model in a checkpoint: its tensors, which are read one at a time, and its class."""

from __future__ import annotations

import functools
import shutil
import tempfile
import weakref
from collections.abc import Collection, Iterable
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor, nn

from ..base.errors import CheckpointError
from ..files.parsing import explain_library_error
from ..model.configuration import check_no_custom_code, check_no_hub_kernels
from ..tensors.chunks import ChunkedTensor, get_local_chunks
from .index import read_index, read_tensors
from .lifecycle import HUGGING_FACE_FOLDER
from .manifest import Manifest, read_verified_file
from .storage import LocalStorage, StorageReader
from .training_state import EMA_PREFIX, MODEL_PREFIX


class StoredModel:
    """The model in a checkpoint, or the moving averages of its trained weights.

    Raises CheckpointError if `use_ema` is set and there are no averages.

    Attributes:
        directory: local directory of its Hugging Face files.
        metadata_files: path and name of each of these files.
        metas: shape and dtype of each tensor.
    """

    def __init__(self, checkpoint: StorageReader, manifest: Manifest, *, use_ema: bool = False) -> None:
        self.storage, self.manifest = checkpoint, manifest
        names = [name for name in manifest.files if PurePath(name).parts[0] == HUGGING_FACE_FOLDER]
        root = self._localize_files(names)
        self.directory = root / HUGGING_FACE_FOLDER
        self.metadata_files = [
            (root / name, PurePath(name).relative_to(HUGGING_FACE_FOLDER).as_posix()) for name in names
        ]
        self._index = read_index(checkpoint, manifest)
        self._uses_ema = use_ema
        if use_ema and not any(name.startswith(EMA_PREFIX) for name in self._index.metas):
            raise CheckpointError(
                f"the checkpoint {checkpoint} has no average of the weights: the run has kept none (ema). Export its "
                f"weights."
            )
        self.metas = {
            name.removeprefix(MODEL_PREFIX): kind
            for name, kind in self._index.metas.items()
            if name.startswith(MODEL_PREFIX)
        }

    def _localize_files(self, names: Iterable[str]) -> Path:
        """Return a local directory with these files: the checkpoint, or a copy that lives as long as this object.

        Signed files are always copied, since they could be replaced after their verification.
        """
        if isinstance(self.storage, LocalStorage) and self.storage.options.key is None:
            return self.storage.path
        root = Path(tempfile.mkdtemp(prefix="meshwright-"))
        weakref.finalize(self, shutil.rmtree, root, ignore_errors=True)
        for name in names:
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(read_verified_file(self.storage, self.manifest, name))
        return root

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Read a full tensor to the CPU, by default in its own dtype."""
        shape, stored_dtype = self.metas[name]
        tensor = torch.empty(shape, dtype=dtype or stored_dtype)
        ema_name = f"{EMA_PREFIX}{name}"
        stored_name = ema_name if self._uses_ema and ema_name in self._index.metas else f"{MODEL_PREFIX}{name}"
        full = ChunkedTensor(tensor.shape, tensor.dtype, tuple(get_local_chunks(tensor)))
        read_tensors(self.storage, self.manifest, self._index, {stored_name: full})
        return tensor


def copy_files(files: Iterable[tuple[Path, str]], output: Path) -> None:
    """Copy files to a directory, each under the given name."""
    for source, name in files:
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, output / name)


def map_to_first_names(model: nn.Module) -> dict[str, str]:
    """Map each name in a model's state to the first name of the same tensor, which checkpoints use."""
    state = model.state_dict(keep_vars=True)
    first_names = {id(value): name for name, value in reversed(state.items())}
    return {name: first_names[id(value)] for name, value in state.items()}


def build_model_on_meta(source: StoredModel, *, is_adapter_base: bool = False) -> nn.Module:
    """Build the model, or the base of adapters, on the meta device: a causal LM, or a token or sequence classifier.

    Raises CheckpointError if transformers cannot build it, or the tensors do not match the model.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

    checkpoint, stored, directory = source.storage, source.metas, source.directory
    if "config.json" not in [name for _, name in source.metadata_files]:
        raise CheckpointError(
            f"the checkpoint {checkpoint} has no configuration of a Hugging Face model, so it cannot be exported."
        )
    check_no_hub_kernels(directory / "config.json")
    check_no_custom_code(directory, where="--trust-remote-code")
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        build: Any = functools.partial(AutoModelForCausalLM.from_config, trust_remote_code=False)
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            # The auto class does not know the configuration of a multimodal model's text part.
            model_classes: list[Any] = [each for each in MODEL_FOR_CAUSAL_LM_MAPPING.values() if isinstance(each, type)]
            build = next((each for each in model_classes if each.config_class is type(config)), build)
        with torch.device("meta"):
            model: nn.Module = build(config)
            if not is_adapter_base and not model.state_dict().keys() >= set(stored):
                model = _build_with_other_head(config, stored) or model
    except Exception as error:
        # Configurations and model classes raise errors of several types.
        raise CheckpointError(
            f"transformers cannot build the model of the checkpoint {checkpoint}: {explain_library_error(error)}"
        ) from error
    unknown = [] if is_adapter_base else sorted(set(stored) - model.state_dict().keys())
    if unknown:
        raise CheckpointError(
            f"the checkpoint {checkpoint} is not of the model that its configuration gives: {type(model).__name__} has "
            f"no {', '.join(unknown[:3])}{', ...' if len(unknown) > 3 else ''}."
        )
    return model


def _build_with_other_head(config: Any, stored: Collection[str]) -> nn.Module | None:
    """Return the token or sequence classifier that has these tensors, on the device of the context."""
    import transformers

    for kind in ("Token", "Sequence"):
        if type(config) in getattr(transformers, f"MODEL_FOR_{kind.upper()}_CLASSIFICATION_MAPPING"):
            auto = getattr(transformers, f"AutoModelFor{kind}Classification")
            model: nn.Module = auto.from_config(config, trust_remote_code=False)
            if model.state_dict().keys() == set(stored):
                return model
    return None

"""Write the adapters of a checkpoint as a directory that `PeftModel.from_pretrained` loads, bit for bit.

The tensors of one adapter are in memory together. Source: peft.PeftModel.save_pretrained.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from .._compat.peft import adapted_on_meta, file_names, is_transposed
from ..base.errors import CheckpointError
from ..model.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS, BASE_FILE, adapter_folder, read_adapter_config
from .stored_model import StoredModel, copy_files, first_names


class AdapterFiles:
    """The files of adapters to be written.

    Args:
        stored: the checkpoint.
        dtype: of the weights; None: as they were saved.
        base: on the meta device.
    """

    def __init__(self, stored: StoredModel, dtype: torch.dtype | None, base: nn.Module) -> None:
        self._stored, self._dtype = stored, dtype
        self.configs = adapter_configs_of(stored)
        noted = stored.manifest.base
        # peft renames the base in configurations to the model on the meta device.
        self._bases = {
            name: (each.base_model_name_or_path, each.revision)
            if noted is None
            else (noted["path"], noted.get("revision"))
            for name, each in self.configs.items()
        }
        self._model = adapted_on_meta(base, self.configs)
        check_tensors_of(self._model, stored)
        self.files = {f"{adapter_folder(name)}/{ADAPTER_WEIGHTS}": name for name in self.configs}
        self._check_nothing_is_lost()

    def write(self, name: str, path: Path) -> None:
        """Read an adapter's tensors and write them."""
        tensors = {}
        named = file_names(self._model, self.files[name])
        for key, source in self._contents(self.files[name]).items():
            own = self._stored.kinds[source][1]
            value = self._stored.read(source, self._dtype if self._dtype and own.is_floating_point else own)
            tensors[key] = value.t().contiguous() if is_transposed(named[key]) else value
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, path, metadata={"format": "pt"})

    def describe(self, output: Path) -> None:
        """Write the configurations, the name of the base, and the tokenizer."""
        for name, config in self.configs.items():
            config.inference_mode = True
            config.base_model_name_or_path, config.revision = self._bases[name]
            config.save_pretrained(output / adapter_folder(name))
        if self._stored.manifest.base is not None:
            (output / BASE_FILE).write_text(json.dumps(self._stored.manifest.base, indent=2) + "\n")
        configurations = (ADAPTER_CONFIG, "config.json")
        kept = [
            (source, name)
            for source, name in self._stored.described
            if not name.endswith(configurations) or name == "tokenizer_config.json"
        ]
        copy_files(kept, output)

    def _contents(self, adapter: str) -> dict[str, str]:
        """Map each tensor in an adapter's file to its name in the checkpoint."""
        first = first_names(self._model)
        named = {key: first[name] for key, name in file_names(self._model, adapter).items()}
        return {key: name for key, name in named.items() if name in self._stored.kinds}

    def _check_nothing_is_lost(self) -> None:
        """Refuse trained tensors that peft's format has no place for.

        A checkpoint without a known base holds the base as well, and does not say which part of it was trained.
        """
        if self._stored.manifest.base is None:
            return
        written = {source for adapter in self.configs for source in self._contents(adapter).values()}
        parameters = {name for name, _ in self._model.named_parameters(remove_duplicate=False)}
        lost = sorted((self._stored.kinds.keys() & parameters) - written)
        if lost:
            some = ", ".join(lost[:3]) + (", ..." if len(lost) > 3 else "")
            raise CheckpointError(
                f"the checkpoint {self._stored.checkpoint} holds what was trained beside its adapters, and the "
                f"directory of an adapter has no place for: {some}. Train it by peft's modules_to_save; or write the "
                f"merged model: meshwright export --merge."
            )


def has_adapters(stored: StoredModel) -> bool:
    """Return whether a checkpoint holds adapters, with their base or without."""
    return any(name.rpartition("/")[2] == ADAPTER_CONFIG for _, name in stored.described)


def adapter_configs_of(stored: StoredModel) -> dict[str, Any]:
    """Return peft's configuration of each adapter in a checkpoint, by the adapter's name. Raises CheckpointError."""
    found = {}
    for path, name in stored.described:
        *folder, file = name.split("/")
        if file == ADAPTER_CONFIG and len(folder) < 2:
            found[folder[0] if folder else "default"] = read_adapter_config(path.parent)
    if not found:
        raise CheckpointError(f"the checkpoint {stored.checkpoint} is of adapters, but has no {ADAPTER_CONFIG}.")
    return found


def check_tensors_of(model: nn.Module, stored: StoredModel) -> None:
    """Raise CheckpointError if the tensors of a checkpoint are not those of its adapters."""
    shapes = {name: value.shape for name, value in model.state_dict(keep_vars=True).items()}
    for name, (shape, _) in stored.kinds.items():
        if shapes.get(name) != shape:
            own = tuple(shapes[name]) if name in shapes else "nothing"
            raise CheckpointError(
                f"the checkpoint {stored.checkpoint} is not of the adapters that its configuration gives: {name} is "
                f"{own} there, and {tuple(shape)} here."
            )

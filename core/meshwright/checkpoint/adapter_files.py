"""Write the adapters of a checkpoint as peft would: a directory that `PeftModel.from_pretrained` loads, bit for bit.

An adapter's tensors are written into one file, as peft has it, and are held at once.
Source: peft.PeftModel.save_pretrained.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from .._compat.peft import file_names, is_transposed
from .._compat.peft_tying import adapted_on_meta
from ..base.errors import CheckpointError
from ..model.adapter import read_adapter_config
from ..model.adapter_base import ADAPTER_CONFIG, ADAPTER_WEIGHTS, BASE_FILE, adapter_folder
from .stored_model import StoredModel


class AdapterFiles:
    """What there is to be written of adapters.

    Args:
        stored: the checkpoint.
        dtype: of the weights; None: as they were saved.
        base: on the meta device.
    """

    def __init__(self, stored: StoredModel, dtype: torch.dtype | None, base: nn.Module) -> None:
        self._stored, self._dtype = stored, dtype
        self.configs = adapter_configs_of(stored)
        told = stored.manifest.base
        # peft gives a configuration the name that the model on the meta device bears.
        self._named = {
            name: (each.base_model_name_or_path, each.revision)
            if told is None
            else (told["path"], told.get("revision"))
            for name, each in self.configs.items()
        }
        self._model = adapted_on_meta(base, self.configs)
        check_tensors_of(self._model, stored)
        self.files = {f"{adapter_folder(name)}/{ADAPTER_WEIGHTS}": name for name in self.configs}
        self._check_all_have_a_place()

    def write(self, name: str, path: Path) -> None:
        """Read an adapter's tensors and write them."""
        read = {}
        named = file_names(self._model, self.files[name])
        for key, source in self._contents(self.files[name]).items():
            value = self._stored.read(source, self._dtype_of(source))
            read[key] = value.t().contiguous() if is_transposed(named[key]) else value
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(read, path, metadata={"format": "pt"})

    def describe(self, output: Path) -> None:
        """Write the configurations, which base they are of, and the tokenizer."""
        for name, config in self.configs.items():
            config.inference_mode = True
            config.base_model_name_or_path, config.revision = self._named[name]
            config.save_pretrained(output / adapter_folder(name))
        if self._stored.manifest.base is not None:
            (output / BASE_FILE).write_text(json.dumps(self._stored.manifest.base, indent=2) + "\n")
        for source, name in self._stored.described:
            if not name.endswith((ADAPTER_CONFIG, "config.json")) or name == "tokenizer_config.json":
                (output / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, output / name)

    def _contents(self, adapter: str) -> dict[str, str]:
        """For each tensor in an adapter's file, the name under which the checkpoint has it."""
        state = self._model.state_dict(keep_vars=True)
        first = {id(value): name for name, value in reversed(state.items())}
        named = {key: first[id(state[name])] for key, name in file_names(self._model, adapter).items()}
        return {key: name for key, name in named.items() if name in self._stored.kinds}

    def _dtype_of(self, name: str) -> torch.dtype:
        own = self._stored.kinds[name][1]
        return self._dtype if self._dtype is not None and own.is_floating_point else own

    def _check_all_have_a_place(self) -> None:
        """Refuse to lose what has been trained: peft's format has the parts that peft makes trainable.

        A checkpoint whose base is unknown holds the base, too, and not what of it was trained.
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
    """Whether a checkpoint holds adapters, with their base or without."""
    return any(name.rpartition("/")[2] == ADAPTER_CONFIG for _, name in stored.described)


def adapter_configs_of(stored: StoredModel) -> dict[str, Any]:
    """peft's configuration of each adapter in a checkpoint, by the adapter's name.

    Raises:
        CheckpointError: there is none.
    """
    found = {}
    for path, name in stored.described:
        *folder, file = name.split("/")
        if file == ADAPTER_CONFIG and len(folder) < 2:
            found[folder[0] if folder else "default"] = read_adapter_config(path.parent)
    if not found:
        raise CheckpointError(f"the checkpoint {stored.checkpoint} is of adapters, but has no {ADAPTER_CONFIG}.")
    return found


def check_tensors_of(model: nn.Module, stored: StoredModel) -> None:
    """Refuse a checkpoint whose tensors are not those of its adapters.

    Raises:
        CheckpointError: names one.
    """
    shapes = {name: value.shape for name, value in model.state_dict(keep_vars=True).items()}
    for name, (shape, _) in stored.kinds.items():
        if shapes.get(name) != shape:
            own = tuple(shapes[name]) if name in shapes else "nothing"
            raise CheckpointError(
                f"the checkpoint {stored.checkpoint} is not of the adapters that its configuration gives: {name} is "
                f"{own} there, and {tuple(shape)} here."
            )

"""Merge an adapter into its base and write the full model, in bounded memory.

Layers are merged as in `model.merge`, so the weights are bitwise identical to those of `merge_and_unload`. But only one
layer at a time is in memory: tensors of the base are read from its files, those of the adapter from the checkpoint or
the adapter's directory.

[Note: tied weights] If an adapter changes one of two tied weights, both are written, and the configuration declares
them untied. So the merged model computes the same as the adapted one. `merge_and_unload` changes both.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._compat.peft import (
    add_adapters_on_meta,
    find_active_copies,
    find_tied_after_merge,
    iter_tuner_layers,
    to_base_name,
)
from ..base.errors import CheckpointError, ConfigError, ModelError
from ..model.adapter import (
    ADAPTER_CONFIG,
    BaseModelRef,
    compute_fingerprint,
    open_adapter_tensors,
    read_adapter_config,
    read_base,
)
from ..model.configuration import config_from_directory
from ..model.layout import set_tie_word_embeddings
from ..model.lazy_tensor import read_full
from ..model.merge import build_merged_layer
from ..model.model_files import TensorReader, drop_replaced_files, get_extra_files, list_tokenizer_files
from ..model.pretrained import find_model_directory, open_pretrained
from ..tensors.state import TensorMeta
from .export import (
    ModelExporter,
    atomic_directory,
    check_adapter_tensors,
    check_output_empty,
    has_adapters,
    load_adapter_configs,
    parse_size,
)
from .manifest import read_and_verify
from .remote_storage import open_storage
from .storage import LocalStorage, StorageLike, StorageReader
from .stored_model import StoredModel, build_model_on_meta, map_to_first_names

TensorReaders = Mapping[str, Callable[[], Tensor]]
"""Functions that read full tensors of a base or adapter into new memory, by name in the model."""


def merge_adapter(
    source: StorageLike,
    output: str | Path,
    *,
    base: str | Path | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: str | int = "5GB",
    use_ema: bool = False,
) -> None:
    """Merge an adapter into its base and write the model as a Hugging Face directory, with one process.

    The directory appears under its name only when it is complete.

    Args:
        source: a checkpoint of adapters, or the directory of one adapter.
        output: a directory that does not exist or is empty.
        base: directory of the base; None: where it was in training.
        dtype: dtype of the base before merging, and of the model; None: as in training.
        max_shard_size: see `export_checkpoint`.
        use_ema: see `export_checkpoint`. An adapter's directory has no moving averages.

    Raises:
        CheckpointError: the source is incomplete, or has no adapter.
        ModelError: the base is missing, or is not the one that the adapter was trained on.
        ConfigError: the output is not empty, or a size is invalid.
    """
    storage, output = open_storage(source), Path(output)
    check_output_empty(output)
    limit = parse_size(max_shard_size)
    merged, metadata_files = _open_source(storage, base, dtype, average=use_ema)
    where = f"the base of {source}"
    exporter = ModelExporter(merged.full, merged, metadata_files, None, limit, num_ranks=1, where=where)
    with atomic_directory(output) as temporary:
        for name in exporter.files:
            exporter.write(name, temporary / name)
        exporter.write_metadata(temporary)
        new = {name: path.read_bytes() for path, name in metadata_files}
        for name, content in drop_replaced_files(merged.files, new).items():
            (temporary / name).parent.mkdir(exist_ok=True)
            (temporary / name).write_bytes(content)


class MergedModel:
    """A base on the meta device with its adapter merged into it; the `ModelTensors` of an export.

    Args:
        model: the base.
        weights: tensors of the base.
        config: peft's configuration of the adapter.
        values: returns the tensors of the adapter's source, given the adapted model.

    Attributes:
        full: the model as it is written, on the meta device.
        files: files of the base besides its weights.
    """

    def __init__(
        self, model: nn.Module, weights: TensorReaders, config: Any, values: Callable[[nn.Module], TensorReaders]
    ) -> None:
        self.full, self._base_readers = copy.deepcopy(model), weights
        self.files = get_extra_files(model)
        self._adapted_model = add_adapters_on_meta(model, {"default": config})
        self._adapter_readers = values(self._adapted_model)
        for name, _ in self._adapted_model.named_parameters():
            if name not in self._adapter_readers and to_base_name(name) not in weights:
                raise CheckpointError(f"neither the adapter nor its base has {name}. Merge a complete one.")
        copies = find_active_copies(self._adapted_model)
        # Maps tensors of the base to their names in the adapted model, or to the trained copies that replace them.
        self._source_names = {
            to_base_name(name): name for name in self._adapted_model.state_dict() if copies.get(name, True)
        }
        # Maps tensors of the base to the wrapper that changes them.
        self._wrapper_paths = {
            to_base_name(name): path
            for path, layer in iter_tuner_layers(self._adapted_model, outermost=True)
            for name in (f"{path}.{each}" for each in layer.state_dict())
            if to_base_name(name) in weights
        }
        # Heads that stay tied to the embedding are read as the embedding.
        self._tied_names = {
            f"{to_base_name(head)}.weight": f"{to_base_name(embedding)}.weight"
            for head, embedding in find_tied_after_merge(self._adapted_model).items()
        }
        self._changed_names = self._wrapper_paths.keys() | {to_base_name(name) for name in copies}
        self._cached_layer: tuple[str, dict[str, Tensor]] | None = None
        self._untie_changed()
        state = self.full.state_dict(keep_vars=True)
        firsts = dict.fromkeys(map_to_first_names(self.full).values())
        self.metas: dict[str, TensorMeta] = {name: (state[name].shape, state[name].dtype) for name in firsts}

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        name = self._tied_names.get(name, name)
        path = self._wrapper_paths.get(name)
        if path is None:
            return self._read_unmerged(self._source_names[name]).to(dtype)
        if self._cached_layer is None or self._cached_layer[0] != path:
            self._cached_layer = None
            self._cached_layer = path, self._merge_layer(path)
        return self._cached_layer[1][name].to(dtype)

    def _merge_layer(self, path: str) -> dict[str, Tensor]:
        layer = self._adapted_model.get_submodule(path)
        values = {f"{path}.{each}": self._read_unmerged(f"{path}.{each}") for each in layer.state_dict()}
        merged = build_merged_layer(layer, path, values).state_dict()
        return {f"{to_base_name(path)}.{name}": tensor for name, tensor in merged.items()}

    def _read_unmerged(self, name: str) -> Tensor:
        return (
            self._adapter_readers[name]() if name in self._adapter_readers else self._base_readers[to_base_name(name)]()
        )

    def _untie_changed(self) -> None:
        """Untie weights that differ after merging; see [Note: tied weights]."""
        state = self.full.state_dict(keep_vars=True)
        for name, other in map_to_first_names(self.full).items():
            if other == name or not {name, other} & self._changed_names:
                continue
            dtype = state[name].dtype
            if not torch.equal(self.read(name, dtype), self.read(other, dtype)):
                self._untie(name, other)
                return

    def _untie(self, *names: str) -> None:
        config = copy.deepcopy(self.full.config)
        set_tie_word_embeddings(config, False)
        dtype = next(self.full.parameters()).dtype
        with torch.device("meta"):
            full = type(self.full)(config).to(dtype)
        state = full.state_dict(keep_vars=True)
        if len({id(state[name]) for name in names}) < len(names):
            raise CheckpointError(
                f"{' and '.join(names)} are tied in {type(full).__name__} whatever its configuration says, and the "
                f"adapter changes one of them: the merged model cannot be written. Use the adapter over its base."
            )
        full.generation_config = getattr(self.full, "generation_config", None)
        self.full = full


def _open_source(
    source: StorageReader, base: str | Path | None, dtype: torch.dtype | None, *, average: bool
) -> tuple[MergedModel, list[tuple[Path, str]]]:
    """Return the merged model of a source, and its metadata files, apart from the base's configuration."""
    if isinstance(source, LocalStorage) and (source.path / ADAPTER_CONFIG).is_file():
        if average:
            raise ConfigError(f"{source} is the directory of an adapter, which has no average. Give a checkpoint.")
        return _open_adapter_directory(source.path, base, dtype)
    manifest = read_and_verify(source)
    stored = StoredModel(source, manifest, use_ema=average)
    if not has_adapters(stored):
        raise CheckpointError(f"the checkpoint {source} holds a whole model: export it without --merge.")
    configs = load_adapter_configs(stored)
    if list(configs) != ["default"]:
        raise CheckpointError(
            f"the checkpoint {source} holds the adapters {', '.join(sorted(configs))}, and which of them are to be "
            f"merged, it does not say. Export it, and merge them with peft."
        )
    if manifest.base is None:
        weights: TensorReaders = {to_base_name(name): partial(stored.read, name) for name in stored.metas}
        model = build_model_on_meta(stored, is_adapter_base=True)
        # The dtype of the embedding, or of the first floating-point tensor.
        model.to(dtype or next(kind for _, kind in stored.metas.values() if kind.is_floating_point))
    else:
        directory = _find_base_directory(BaseModelRef(**manifest.base), base)
        config = config_from_directory(stored.directory, {}, with_weights=False)
        model, pretrained = open_pretrained(directory, config, dtype=dtype)
        weights = _build_readers(pretrained.sources)

    def values(adapted: nn.Module) -> TensorReaders:
        check_adapter_tensors(adapted, stored)
        first_names = {name: first for name, first in map_to_first_names(adapted).items() if first in stored.metas}
        return {name: partial(stored.read, first_name) for name, first_name in first_names.items()}

    metadata_files = [each for each in stored.metadata_files if each[1].rpartition("/")[2] != ADAPTER_CONFIG]
    return MergedModel(model, weights, configs["default"], values), metadata_files


def _open_adapter_directory(
    source: Path, base: str | Path | None, dtype: torch.dtype | None
) -> tuple[MergedModel, Any]:
    config, recorded = read_adapter_config(source), read_base(source)
    if recorded is not None:
        directory = _find_base_directory(recorded, base)
    else:
        path = base or config.base_model_name_or_path
        if not path:
            raise ModelError(f"{source} names no base. Give it: --base DIR.")
        directory = find_model_directory(str(path), revision=config.revision if base is None else None)
    model, pretrained = open_pretrained(directory, config_from_directory(directory, {}), dtype=dtype)

    return MergedModel(
        model,
        _build_readers(pretrained.sources),
        config,
        lambda adapted: _build_readers(open_adapter_tensors(source, adapted)),
    ), list_tokenizer_files(source)


def _build_readers(sources: Mapping[str, TensorReader]) -> TensorReaders:
    # Files are memory-mapped, and merging modifies tensors in place.
    return {name: lambda each=each: read_full(each).clone() for name, each in sources.items()}  # type: ignore[misc]


def _find_base_directory(recorded: BaseModelRef, override: str | Path | None) -> Path:
    try:
        directory = find_model_directory(
            str(override or recorded.path), revision=None if override else recorded.revision
        )
    except ModelError as error:
        raise ModelError(f"the base of the adapter cannot be found: {error} Say where it is: --base DIR.") from None
    fingerprint = compute_fingerprint(directory)
    if fingerprint != recorded.fingerprint:
        raise ModelError(
            f"{directory} is not the base of the adapter: its fingerprint is {fingerprint[:12]}, and that of the base, "
            f"{recorded}. Give the base that it was trained on: --base DIR."
        )
    return directory

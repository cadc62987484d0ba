"""Merge an adapter into its base: write a full model, in bounded memory.

Layers are merged as by `model.merge`, so that the weights are those of `merge_and_unload`, bit for bit. But one layer
at a time is in memory: tensors of the base are read from its files, those of the adapter from the checkpoint or the
adapter's directory.

[Note: tied weights] Where an adapter changes one of two tied weights, both are written, and the configuration says that
they are not tied, so that the merged model computes what the adapted one did. `merge_and_unload` changes both.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._compat.peft import active_copies, adapted_on_meta, base_name, merged_alike, wrappers
from ..base.errors import CheckpointError, ConfigError, ModelError
from ..model.adapter import ADAPTER_CONFIG, Base, files_of, fingerprint_of, read_adapter_config, read_base
from ..model.configuration import config_from_directory
from ..model.layout import set_tied
from ..model.merge import merged_layer
from ..model.model_files import Source, kept_files, tokenizer_files, without_replaced
from ..model.pretrained import find_directory, open_pretrained
from ..model.recorded import read_whole
from ..tensors.state import TensorKind
from .export import Export, adapter_configs_of, as_bytes, check_empty, check_tensors_of, has_adapters, written_whole
from .manifest import read_and_verified
from .places import LocalFolder, Place, Where
from .remote import place_of
from .stored_model import StoredModel, first_names, model_on_meta

Values = Mapping[str, Callable[[], Tensor]]
"""Reads full tensors of a base, or of an adapter's source, into new memory, by their names in the model."""


def merge_adapter(
    source: Where,
    output: str | Path,
    *,
    base: str | Path | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: str | int = "5GB",
    average: bool = False,
) -> None:
    """Write an adapter merged into its base as a Hugging Face directory, with one process.

    The directory appears under its name when it is complete.

    Args:
        source: a checkpoint of adapters, or the directory of one adapter.
        output: a directory that is missing or empty.
        base: directory of the base, if it is not where it was in training.
        dtype: of the base before merging, and of the model; None: as in training.
        max_shard_size, average: as of `export_checkpoint`; an adapter's directory has no average.

    Raises:
        CheckpointError: the source is incomplete, or has no adapter.
        ModelError: the base is missing, or is another.
        ConfigError: the output is not empty, or a size is invalid.
    """
    place, output = place_of(source), Path(output)
    check_empty(output)
    limit = as_bytes(max_shard_size)
    merged, described = _opened(place, base, dtype, average=average)
    where = f"the base of {source}"
    export = Export(merged.full, merged, described, None, limit, ranks=1, where=where)
    with written_whole(output) as writing:
        for name in export.files:
            export.write(name, writing / name)
        export.describe(writing)
        new = {name: path.read_bytes() for path, name in described}
        for name, content in without_replaced(merged.files, new).items():
            (writing / name).parent.mkdir(exist_ok=True)
            (writing / name).write_bytes(content)


class Merged:
    """A base on the meta device with its adapter; `Tensors` of an export.

    `weights` are the base's; `values` returns the tensors of the adapter's source for the adapted model.

    Attributes:
        full: the model as it is to be written.
        files: of the base, besides its weights.
    """

    def __init__(self, model: nn.Module, weights: Values, config: Any, values: Callable[[nn.Module], Values]) -> None:
        self.full, self._weights = copy.deepcopy(model), weights
        self.files = kept_files(model)
        self._adapted = adapted_on_meta(model, {"default": config})
        self._values = values(self._adapted)
        for name, _ in self._adapted.named_parameters():
            if name not in self._values and base_name(name) not in weights:
                raise CheckpointError(f"neither the adapter nor its base has {name}. Merge one that is whole.")
        copies = active_copies(self._adapted)
        # Maps tensors of the base to their names in the adapted model, or to the trained copy in their place.
        self._names = {base_name(name): name for name in self._adapted.state_dict() if copies.get(name, True)}
        # Maps tensors of the base to the wrapper that changes them.
        self._wrapper = {
            base_name(name): path
            for path, layer in wrappers(self._adapted, outermost=True)
            for name in (f"{path}.{each}" for each in layer.state_dict())
            if base_name(name) in weights
        }
        # Heads that stay tied to the embedding are read as the embedding.
        self._alike = {
            f"{base_name(head)}.weight": f"{base_name(embedding)}.weight"
            for head, embedding in merged_alike(self._adapted).items()
        }
        self._changed = self._wrapper.keys() | {base_name(name) for name in copies}
        self._last: tuple[str, dict[str, Tensor]] | None = None
        self._untie_what_differs()
        state = self.full.state_dict(keep_vars=True)
        firsts = dict.fromkeys(first_names(self.full).values())
        self.kinds: dict[str, TensorKind] = {name: (state[name].shape, state[name].dtype) for name in firsts}

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        name = self._alike.get(name, name)
        path = self._wrapper.get(name)
        if path is None:
            return self._before(self._names[name]).to(dtype)
        if self._last is None or self._last[0] != path:
            self._last = None
            self._last = path, self._merged(path)
        return self._last[1][name].to(dtype)

    def _merged(self, path: str) -> dict[str, Tensor]:
        layer = self._adapted.get_submodule(path)
        values = {f"{path}.{each}": self._before(f"{path}.{each}") for each in layer.state_dict()}
        merged = merged_layer(layer, path, values).state_dict()
        return {f"{base_name(path)}.{name}": tensor for name, tensor in merged.items()}

    def _before(self, name: str) -> Tensor:
        return self._values[name]() if name in self._values else self._weights[base_name(name)]()

    def _untie_what_differs(self) -> None:
        """See [Note: tied weights]."""
        state = self.full.state_dict(keep_vars=True)
        for name, other in first_names(self.full).items():
            if other == name or not {name, other} & self._changed:
                continue
            dtype = state[name].dtype
            if not torch.equal(self.read(name, dtype), self.read(other, dtype)):
                self._untie(name, other)
                return

    def _untie(self, *names: str) -> None:
        config = copy.deepcopy(self.full.config)
        set_tied(config, False)
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


def _opened(
    source: Place, base: str | Path | None, dtype: torch.dtype | None, *, average: bool
) -> tuple[Merged, list[tuple[Path, str]]]:
    """Return the merged model of a source, and the files that describe it besides the base's configuration."""
    if isinstance(source, LocalFolder) and (source.path / ADAPTER_CONFIG).is_file():
        if average:
            raise ConfigError(f"{source} is the directory of an adapter, which has no average. Give a checkpoint.")
        return _of_directory(source.path, base, dtype)
    manifest = read_and_verified(source)
    stored = StoredModel(source, manifest, average=average)
    if not has_adapters(stored):
        raise CheckpointError(f"the checkpoint {source} holds a whole model: export it without --merge.")
    configs = adapter_configs_of(stored)
    if list(configs) != ["default"]:
        raise CheckpointError(
            f"the checkpoint {source} holds the adapters {', '.join(sorted(configs))}, and which of them are to be "
            f"merged, it does not say. Export it, and merge them with peft."
        )
    if manifest.base is None:
        weights: Values = {base_name(name): partial(stored.read, name) for name in stored.kinds}
        model = model_on_meta(stored, adapted=True)
        # That of the embedding, or what else comes first.
        model.to(dtype or next(kind for _, kind in stored.kinds.values() if kind.is_floating_point))
    else:
        directory = _base_directory(Base(**manifest.base), base)
        config = config_from_directory(stored.directory, {}, with_weights=False)
        model, pretrained = open_pretrained(directory, config, dtype=dtype)
        weights = _values_of(pretrained.sources)

    def values(adapted: nn.Module) -> Values:
        check_tensors_of(adapted, stored)
        own = {name: first for name, first in first_names(adapted).items() if first in stored.kinds}
        return {name: partial(stored.read, kept) for name, kept in own.items()}

    described = [each for each in stored.described if each[1].rpartition("/")[2] != ADAPTER_CONFIG]
    return Merged(model, weights, configs["default"], values), described


def _of_directory(source: Path, base: str | Path | None, dtype: torch.dtype | None) -> tuple[Merged, Any]:
    config, noted = read_adapter_config(source), read_base(source)
    if noted is not None:
        directory = _base_directory(noted, base)
    else:
        named = base or config.base_model_name_or_path
        if not named:
            raise ModelError(f"{source} names no base. Give it: --base DIR.")
        directory = find_directory(str(named), revision=config.revision if base is None else None)
    model, pretrained = open_pretrained(directory, config_from_directory(directory, {}), dtype=dtype)

    return Merged(
        model, _values_of(pretrained.sources), config, lambda adapted: _values_of(files_of(source, adapted))
    ), tokenizer_files(source)


def _values_of(sources: Mapping[str, Source]) -> Values:
    # Files are mapped, and merging changes tensors in place.
    return {name: lambda each=each: read_whole(each).clone() for name, each in sources.items()}  # type: ignore[misc]


def _base_directory(noted: Base, given: str | Path | None) -> Path:
    try:
        directory = find_directory(str(given or noted.path), revision=None if given else noted.revision)
    except ModelError as error:
        raise ModelError(f"the base of the adapter cannot be found: {error} Say where it is: --base DIR.") from None
    found = fingerprint_of(directory)
    if found != noted.fingerprint:
        raise ModelError(
            f"{directory} is not the base of the adapter: its fingerprint is {found[:12]}, and that of the base, "
            f"{noted}. Give the base that it was trained on: --base DIR."
        )
    return directory

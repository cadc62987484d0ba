"""Merge adapters into their base: a whole model, written in bounded memory.

Layers are merged as `model.merge` merges those of a model that trains, so that the weights are those of
`merge_and_unload`, to the bit. But of the adapted model one layer at a time has values: those of its base are read from
the base's files, those of the adapter from the checkpoint, or from the directory of an adapter.

[Note: tied weights] Where an adapter changes one of two tied weights, both are written, and the configuration says that
they are not tied. So the merged model computes what the adapted one has computed. `merge_and_unload` adds the change to
both.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._compat.peft import active_copies, base_name, wrappers
from .._compat.peft_tying import adapted_on_meta, merged_alike
from ..base.errors import CheckpointError, ConfigError, ModelError
from ..model.adapter import files_of, read_adapter_config
from ..model.adapter_base import ADAPTER_CONFIG, Base, fingerprint_of, read_base
from ..model.base_files import kept_files, tokenizer_files, without_replaced
from ..model.configuration import config_from_directory
from ..model.merge import merged_layer
from ..model.pretrained import PretrainedWeights, find_directory, open_pretrained
from ..model.pretrained.files import Source
from ..model.ties import set_tied
from ..tensors.state import TensorKind
from .adapter_files import adapter_configs_of, check_tensors_of, has_adapters
from .export import Export, as_bytes, check_empty, written_whole
from .manifest import read_manifest, verify
from .opening import place_of
from .places import LocalFolder, Place, Where
from .stored_model import StoredModel, model_on_meta


def merge_adapter(
    source: Where,
    output: str | Path,
    *,
    base: str | Path | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: str | int = "5GB",
    average: bool = False,
) -> None:
    """Write the model that an adapter and its base make, as a Hugging Face directory, with one process.

    It appears under its name when it is complete, and not before.

    Args:
        source: a checkpoint of adapters, or the directory of one adapter.
        output: a directory that is missing or empty.
        base: where the base is, if not where it was in training.
        dtype: of the base before it is merged, and so of the model; None: as the base was trained on.
        max_shard_size, average: as of `export_checkpoint`; an adapter's directory has no average.

    Raises:
        CheckpointError: the source is not whole, or has no adapter.
        ModelError: the base is missing, or another.
        ConfigError: the output is in the way, or a size is none.
    """
    place, output = place_of(source), Path(output)
    check_empty(output)
    limit = as_bytes(max_shard_size)
    merged, described = _opened(place, base, dtype, average=average)
    where = f"the base of {source}"
    export = Export(merged.whole, merged, described, None, limit, ranks=1, where=where)
    with written_whole(output) as writing:
        for name in export.files:
            export.write(name, writing / name)
        export.describe(writing)
        new = {name: path.read_bytes() for path, name in described}
        for name, content in without_replaced(merged.files, new).items():
            (writing / name).parent.mkdir(exist_ok=True)
            (writing / name).write_bytes(content)


Values = Mapping[str, Callable[[], Tensor]]
"""What an adapter's source has, by the names of the adapted model."""


class StoredBase:
    """The weights of a base that a checkpoint holds together with its adapters."""

    def __init__(self, stored: StoredModel) -> None:
        self._stored, self._names = stored, {base_name(name): name for name in stored.kinds}

    def __contains__(self, name: object) -> bool:
        return name in self._names

    @property
    def dtype(self) -> torch.dtype:
        """Of the embedding, or what else comes first."""
        return next(dtype for _, dtype in self._stored.kinds.values() if dtype.is_floating_point)

    def shape(self, name: str) -> torch.Size:
        """Of a whole weight."""
        return torch.Size(self._stored.kinds[self._names[name]][0])

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """A rectangle of a weight."""
        whole = self._stored.read(self._names[name])
        return whole[tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))]


class Merged:
    """The tensors of a base with its adapter; `Tensors` of an export.

    Args:
        model, weights: of the base, on the meta device.
        config: of the adapter.
        values: reads what the adapter's source has, by the names of the adapted model.

    Attributes:
        whole: the model as it is to be written.
        kinds: shape and dtype of each tensor.
        files: of the base, beside its weights.
    """

    def __init__(
        self,
        model: nn.Module,
        weights: PretrainedWeights | StoredBase,
        config: Any,
        values: Callable[[nn.Module], Values],
    ) -> None:
        self.whole, self._weights = copy.deepcopy(model), weights
        self.files = kept_files(model)
        self._adapted = adapted_on_meta(model, {"default": config})
        self._values = values(self._adapted)
        for name, _ in self._adapted.named_parameters():
            if name not in self._values and base_name(name) not in weights:
                raise CheckpointError(f"neither the adapter nor its base has {name}. Merge one that is whole.")
        copies = active_copies(self._adapted)
        # Of each tensor of the base: its name in the adapted model, or that of the trained copy in its place.
        self._names = {base_name(name): name for name in self._adapted.state_dict() if copies.get(name, True)}
        # The wrapper that changes it.
        self._wrapper = {
            base_name(name): path
            for path, layer in wrappers(self._adapted, outermost=True)
            for name in (f"{path}.{each}" for each in layer.state_dict())
            if base_name(name) in weights
        }
        # Heads that merging leaves tied to the embedding are read as the embedding.
        self._alike = {
            f"{base_name(head)}.weight": f"{base_name(embedding)}.weight"
            for head, embedding in merged_alike(self._adapted).items()
        }
        self._changed = self._wrapper.keys() | {base_name(name) for name in copies}
        self._last: tuple[str, dict[str, Tensor]] | None = None
        self._untie_what_differs()
        state = self.whole.state_dict(keep_vars=True)
        # Each once, by the first of its names, as a checkpoint has it.
        first = {id(value): name for name, value in reversed(state.items())}
        self.kinds: dict[str, TensorKind] = {name: (state[name].shape, state[name].dtype) for name in first.values()}

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """All of a tensor of the merged model, in the dtype of the base."""
        name = self._alike.get(name, name)
        path = self._wrapper.get(name)
        if path is None:
            return self._before(self._names[name]).to(dtype)
        if self._last is None or self._last[0] != path:
            self._last = None
            self._last = path, self._merged(path)
        return self._last[1][name].to(dtype)

    def _merged(self, path: str) -> dict[str, Tensor]:
        """The tensors of one layer of the base, with what the adapter makes of them."""
        layer = self._adapted.get_submodule(path)
        values = {name: self._before(name) for name in (f"{path}.{each}" for each in layer.state_dict())}
        merged = merged_layer(layer, path, values).state_dict()
        return {f"{base_name(path)}.{name}": tensor for name, tensor in merged.items()}

    def _before(self, name: str) -> Tensor:
        """A tensor of the adapted model, before merging."""
        if name in self._values:
            return self._values[name]()
        below = base_name(name)
        shape = self._weights.shape(below)
        # What is merged is changed in place, and files are mapped.
        return self._weights.read(below, [0] * len(shape), list(shape)).clone()

    def _untie_what_differs(self) -> None:
        """See [Note: tied weights]."""
        state = self.whole.state_dict(keep_vars=True)
        first: dict[int, str] = {}
        for name, value in state.items():
            other = first.setdefault(id(value), name)
            if other == name or not {name, other} & self._changed:
                continue
            if not torch.equal(self.read(name, value.dtype), self.read(other, value.dtype)):
                self._untie(name, other)
                return

    def _untie(self, *names: str) -> None:
        config = copy.deepcopy(self.whole.config)
        set_tied(config, False)
        dtype = next(self.whole.parameters()).dtype
        with torch.device("meta"):
            whole = type(self.whole)(config).to(dtype)
        state = whole.state_dict(keep_vars=True)
        if len({id(state[name]) for name in names}) < len(names):
            raise CheckpointError(
                f"{' and '.join(names)} are tied in {type(whole).__name__} whatever its configuration says, and the "
                f"adapter changes one of them: the merged model cannot be written. Use the adapter over its base."
            )
        whole.generation_config = getattr(self.whole, "generation_config", None)
        self.whole = whole


# -- where an adapter comes from


def _opened(
    source: Place, base: str | Path | None, dtype: torch.dtype | None, *, average: bool
) -> tuple[Merged, list[tuple[Path, str]]]:
    """The merged model of a source, and what describes it beside the base's configuration."""
    if isinstance(source, LocalFolder) and (source.path / ADAPTER_CONFIG).is_file():
        if average:
            raise ConfigError(f"{source} is the directory of an adapter, which has no average. Give a checkpoint.")
        return _of_directory(source.path, base, dtype)
    manifest = read_manifest(source)
    verify(source, manifest, list(manifest.files))
    stored = StoredModel(source, manifest, average=average)
    if not has_adapters(stored):
        raise CheckpointError(f"the checkpoint {source} holds a whole model: export it without --merge.")
    configs = adapter_configs_of(stored)
    if list(configs) != ["default"]:
        raise CheckpointError(
            f"the checkpoint {source} holds the adapters {', '.join(sorted(configs))}, and which of them are to be "
            f"merged, it does not say. Export it, and merge them with peft."
        )
    model: nn.Module
    weights: PretrainedWeights | StoredBase
    if manifest.base is None:
        model, weights = model_on_meta(stored, adapted=True), StoredBase(stored)
        model.to(dtype or weights.dtype)
    else:
        directory = _base_directory(Base(**manifest.base), base)
        config = config_from_directory(stored.directory, {}, with_weights=False)
        model, weights = open_pretrained(directory, config, dtype=dtype)

    def values(adapted: nn.Module) -> Values:
        check_tensors_of(adapted, stored)
        state = adapted.state_dict(keep_vars=True)
        first = {id(value): name for name, value in reversed(state.items())}
        own = {name: first[id(value)] for name, value in state.items() if first[id(value)] in stored.kinds}
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
    model, weights = open_pretrained(directory, config_from_directory(directory, {}), dtype=dtype)

    def values(adapted: nn.Module) -> Values:
        return {name: partial(_whole, each) for name, each in files_of(source, adapted).items()}

    return Merged(model, weights, config, values), tokenizer_files(source)


def _whole(source: Source) -> Tensor:
    return source.read([0] * len(source.shape), list(source.shape)).clone()


def _base_directory(noted: Base, given: str | Path | None) -> Path:
    """Where the base is.

    Raises:
        ModelError: it is not there, or another is.
    """
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

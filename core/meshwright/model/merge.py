"""Parameters of a base model with its adapters merged, yielded one at a time in bounded memory.

peft's own code merges each wrapped layer separately: a copy of the wrapper without memory gets the full tensors of this
layer and returns the base's. So the result is bitwise identical to `merge_and_unload`, in the memory of one layer.
There is one exception: if one of two tied weights is adapted, both are yielded, as the adapted model uses them.
`merge_and_unload` adds the change to both.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from .._compat.peft import (
    find_active_copies,
    find_tied_after_merge,
    is_peft_model,
    iter_tuner_layers,
    merge_layer,
    to_base_name,
)
from ..base.errors import ConfigError, StrategyError
from ..mesh.mesh import Mesh
from ..tensors.gather_parameters import ParameterChunks, iter_full_parameters
from .weights import set_tensor

AdapterMode: TypeAlias = Literal["apart", "merged"]
"""Whether adapters are yielded separately by peft's names, or merged into the base by the base's names."""


class AdapterMerger:
    """Merge the active adapters of a model; created before sharding. `needed_names`: parameters that merging needs."""

    def __init__(self, model: nn.Module) -> None:
        layers = dict(iter_tuner_layers(model, outermost=True))
        # Without memory; tied parameters stay tied.
        empty: dict[int, Any] = {
            id(each): nn.Parameter(torch.empty_like(each, device="meta"), requires_grad=False)
            for each in model.parameters()
        }
        self._layers: dict[str, Any] = copy.deepcopy(layers, empty)
        first_names: dict[int, str] = {}
        parameters = dict(model.named_parameters(remove_duplicate=False))
        self._first_names = {name: first_names.setdefault(id(each), name) for name, each in parameters.items()}
        # Heads that stay tied to the embedding after merging.
        self._unchanged_layers = find_tied_after_merge(model)
        self._layer_by_parameter = {name: path for path in layers for name in parameters if name.startswith(f"{path}.")}
        # Layers that share parameters are merged together.
        self._groups: list[list[str]] = []
        for path in self._layers:
            path_names = set(self._list_needed([path]))
            overlapping = [group for group in self._groups if path_names & set(self._list_needed(group))]
            disjoint = [group for group in self._groups if group not in overlapping]
            self._groups = [*disjoint, [*(each for group in overlapping for each in group), path]]
        self._group_by_parameter = {
            name: index for index, group in enumerate(self._groups) for name in self._list_needed(group)
        }
        copies = find_active_copies(model)
        self.needed_names = tuple(
            name
            for name in dict.fromkeys(self._first_names.values())
            if name in self._group_by_parameter or copies.get(name, True)
        )

    def merge(self, pairs: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None) -> Iterator[Any]:
        """Yield the base model's parameters, merged, with their names.

        `pairs` are names and full tensors of `needed_names` in order. The tensors are modified in place.
        """
        pending: dict[int, dict[str, Tensor]] = {}
        for name, tensor in pairs:
            index = self._group_by_parameter.get(name)
            if index is None:
                yield to_base_name(name), _convert(tensor, dtype)
                continue
            tensors = pending.setdefault(index, {})
            tensors[name] = tensor
            del tensor
            if len(tensors) == len(self._list_needed(self._groups[index])):
                for merged, value in self._merge_group(self._groups[index], pending.pop(index)):
                    yield merged, _convert(value, dtype)
                del tensors

    def _list_needed(self, group: list[str]) -> list[str]:
        return list(
            dict.fromkeys(self._first_names[name] for name, path in self._layer_by_parameter.items() if path in group)
        )

    @torch.no_grad()
    def _merge_group(self, group: list[str], tensors: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
        # Only one of several tied tensors changes.
        values = {
            name: tensors[first] if first == name else tensors[first].clone()
            for name, first in self._first_names.items()
            if first in tensors
        }
        result = {to_base_name(name): value for name, value in values.items() if name not in self._layer_by_parameter}
        for path in group:
            if path not in self._unchanged_layers:
                merged = build_merged_layer(self._layers[path], path, values).named_parameters()
                result |= {f"{to_base_name(path)}.{name}": each.detach() for name, each in merged}
        return list(result.items())


def build_merged_layer(layer: nn.Module, path: str, values: Mapping[str, Tensor]) -> nn.Module:
    """Merge a copy of a wrapper, named `path`, given the values of its tensors, which are modified in place."""
    layer = copy.deepcopy(layer)
    for name, _ in list(layer.named_parameters(remove_duplicate=False)):
        set_tensor(layer, name, nn.Parameter(values[f"{path}.{name}"], requires_grad=False))
    for name, buffer in list(layer.named_buffers(remove_duplicate=False)):
        set_tensor(layer, name, values.get(f"{path}.{name}", buffer))
    return merge_layer(layer, to_base_name(path))


class ParameterOwner(Protocol):
    mesh: Mesh

    def parameter_chunks(self) -> ParameterChunks: ...


def build_merger(model: nn.Module) -> AdapterMerger | None:
    """Return the merger of a model's adapters; None if it has none."""
    return AdapterMerger(model) if is_peft_model(model) else None


def iter_parameters(
    manager: ParameterOwner, *, bucket_bytes: int, dtype: torch.dtype | None, adapters: AdapterMode
) -> Iterator[tuple[str, Tensor]]:
    """Iterate over full parameters; see `iter_full_parameters`. Collective like it.

    For a manager without `adapter_merger`, both values of `adapters` give the same result.
    """

    def check() -> None:
        if adapters not in ("apart", "merged"):
            raise ConfigError(f"adapters={adapters!r} must be 'apart' or 'merged'.")

    get_chunks, mesh = manager.parameter_chunks, manager.mesh
    merger: AdapterMerger | None = getattr(manager, "adapter_merger", None)
    mesh.world.run_on_all_ranks(check)
    if adapters == "apart" or merger is None:
        return iter_full_parameters(get_chunks, mesh, bucket_bytes=bucket_bytes, dtype=dtype)

    def get_needed_chunks() -> ParameterChunks:
        chunks = get_chunks()
        missing = sorted(set(merger.needed_names) - chunks.keys())
        if missing:
            raise StrategyError(f"{missing[0]} is needed to merge adapters, and not among parameter_chunks.")
        return {name: chunks[name] for name in merger.needed_names}

    return merger.merge(iter_full_parameters(get_needed_chunks, mesh, bucket_bytes=bucket_bytes, dtype=None), dtype)


def _convert(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
